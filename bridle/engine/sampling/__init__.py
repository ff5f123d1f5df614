"""Sampling: from decisions and logits to sampled tokens. A sampling row samples one token."""
