"""From decisions and logits to sampled tokens: the rows from which tokens are sampled."""
