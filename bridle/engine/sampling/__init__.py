"""From decisions and logits to sampled tokens: which row each token is sampled from."""
