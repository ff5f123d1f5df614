"""LoRA adapters of served models: configuration, registry, and the adapter that a request names."""
