"""Tools for developers of bridle, which users do not need: benchmarks against other programs, a simulation of whole
clusters, the training of the demo model.

It lies next to the package and is no part of its wheel. The package never imports it; from a checkout `bridle bench
NAME` finds the benchmarks here.
"""
