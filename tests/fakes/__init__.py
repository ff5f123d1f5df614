"""What our own tests and benchmarks need beside `bridle.testing`: a controller runtime in one thread, what an engine
must give by the simplest means, tiny random checkpoints, and bodies that a hostile client would send.

It imports its parts only where they are named, so that no part needs another's dependencies.
"""
