"""Fakes for tests of users and of bridle itself: `scripted` replaces a model, `clock` replaces time, and `text`
replaces a tokenizer.

Only tests import this package. The package imports a module when a name of that module is first used. So no module
needs the dependencies of another one.
"""
