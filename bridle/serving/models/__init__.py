"""Models of a server: registry, loading on demand, memory, adding and removing models."""
