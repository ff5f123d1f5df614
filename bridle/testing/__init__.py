"""Fakes of the engine's surroundings, shipped for users' tests as well as our own: `scripted` stands in for a model,
`clock` for time, `text` for a tokenizer.

Nothing outside of tests imports this package, and it imports its parts only where they are named, so that no part needs
another's dependencies.
"""
