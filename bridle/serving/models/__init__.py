"""Models of a server: their registry, loading on demand, memory, and adding and removing models."""
