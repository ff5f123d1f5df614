"""What is of use to people who work on bridle, and to nobody who uses it: benchmarks beside peers, a simulation of
whole clusters, the training of the demo model.

It stands beside the package and is no part of its wheel. The package never imports it; from a checkout
`bridle bench NAME` finds the benchmarks here.
"""
