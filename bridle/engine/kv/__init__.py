"""Blocks of the KV cache: shared, found again by hash, freed, retained."""
