"""Speculative decoding: proposers of draft tokens, the costs of drafts, and verification."""
