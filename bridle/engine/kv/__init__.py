"""Blocks of the KV cache: sharing, lookup by hash, freeing, and retention."""
