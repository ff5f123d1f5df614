"""Fakes for tests and benchmarks besides `bridle.testing`: a controller runtime in one thread, a reference engine, tiny
random checkpoints and hostile request bodies. The package does not import its modules, because they have different
dependencies."""
