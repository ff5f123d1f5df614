"""Fakes of the engine's surroundings, shipped for users' tests as well as bridle's own: `scripted` replaces a model,
`clock` replaces time, `text` replaces a tokenizer.

Only tests import this package. It imports its modules when their names are used, so that no module needs another one's
dependencies.
"""
