"""A shard process over a fake device that takes a fixed time and computes nothing, for `bridle bench shard`."""

from __future__ import annotations

import argparse
import sys

from bridle.distributed.child_process import die_with_parent
from bridle.distributed.process import run_shard
from dev.bench.shard import TimedExecutor

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", required=True, type=float)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    sys.exit(run_shard(TimedExecutor(options.seconds), options.listen, warm=False))
