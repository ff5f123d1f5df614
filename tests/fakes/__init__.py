"""Fakes for our own tests and benchmarks besides `bridle.testing`: a controller runtime in one thread, a reference
engine, tiny random checkpoints, and bodies that a hostile client would send.

It imports its parts only where they are named, so that no part needs another's dependencies.
"""
