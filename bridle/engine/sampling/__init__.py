"""Sampling: from decisions and logits to sampled tokens, by rows that each sample one token."""
