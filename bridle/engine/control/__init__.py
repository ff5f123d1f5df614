"""Controllers of sequences: whom to ask, what they answer, and whether it is valid."""
