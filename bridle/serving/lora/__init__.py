"""LoRA adapters of served models: their configuration, a registry, and what a request names."""
