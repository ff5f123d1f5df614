"""Tools for developers of bridle, which users do not need: benchmarks against other programs, a simulation of whole
clusters, the training of the demo model.

`dev` is next to the package in a checkout and not part of its wheel. The package never imports `dev`, except that
`bridle bench NAME` finds the benchmarks here.
"""
