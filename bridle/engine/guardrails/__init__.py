"""Output policies of an operator, matched against text while it grows."""
