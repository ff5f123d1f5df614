"""Measurements that users can repeat: `bridle bench NAME`, one module per benchmark. Benchmarks for developers of
bridle are in a checkout's `dev/`.

A benchmark measures its peers or its physical limit in the same run, in turns, so that a noisy machine disturbs all
alike: read the ratios. It knows nothing of the command line; it prints a table and gives its figures as JSON.
"""

from bridle.bench.run import BENCHMARKS, benchmarks, run
from bridle.bench.settings import BenchSettings

__all__ = ["BENCHMARKS", "BenchSettings", "benchmarks", "run"]
