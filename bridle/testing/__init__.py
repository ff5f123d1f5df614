"""Doubles of everything around the engine, shipped for users' tests as well as our own.

`scripted` stands in for a model, `clock` for time, `controllers` for a controller runtime, `text` for a
tokenizer; `reference` computes what the engine must give, by the simplest means. Nothing outside of tests
imports this package, and it imports its parts only where they are named, so that no part needs another's
dependencies.
"""
