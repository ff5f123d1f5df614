"""Controllers of sequences: when the engine asks them, and how it validates their answers."""
