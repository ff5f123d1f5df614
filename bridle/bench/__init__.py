"""Measurements that users can repeat: `bridle bench NAME`, one module per benchmark. Benchmarks for developers of
bridle are in a checkout's `dev/`.

A benchmark measures bridle and its baseline (another program or a physical limit) in the same run and in turns. So
other work on the machine affects bridle and the baseline alike, and the ratios are reliable. A benchmark does not use
the command line; it prints a table and returns its figures for JSON.
"""

from bridle.bench.run import BENCHMARKS, benchmarks, run
from bridle.bench.settings import BenchSettings

__all__ = ["BENCHMARKS", "BenchSettings", "benchmarks", "run"]
