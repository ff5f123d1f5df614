"""Output policies of an operator, matched against an output while it grows."""
