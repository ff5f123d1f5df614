"""Fakes for bridle's own tests and benchmarks besides `bridle.testing`: a controller runtime in one thread, a reference
engine, tiny random checkpoints, and bodies that a hostile client would send.

The package does not import its modules, so that no module needs the dependencies of another.
"""
