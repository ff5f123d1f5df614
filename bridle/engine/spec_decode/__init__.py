"""Speculative decoding: proposers of draft tokens, their costs, and verification."""
