"""LoRA adapters of served models: configuration, registry, and resolving the adapter that a request names."""
