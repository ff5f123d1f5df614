"""How the demo model was made: a generator of text, a tokenizer, a trainer, and an examination."""
