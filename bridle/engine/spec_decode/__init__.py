"""Speculative decoding: proposers of draft tokens, the cost of drafts, and verification."""
