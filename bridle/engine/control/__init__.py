"""Controllers of sequences: when they are asked, their answers, and the validation of these."""
