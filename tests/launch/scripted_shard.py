"""A shard process with a scripted executor, for tests of lost shards: it starts quickly, and its steps are slow."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from bridle.distributed.child_process import die_with_parent
from bridle.distributed.process import run_shard
from bridle.launch.warm_standby import wait_for_activation
from bridle.testing.scripted import ScriptedExecutor

STEP_SECONDS = 0.005
DEADLY_TOKEN = 31  # who computes it ends the process


def make_executor(**options: Any) -> ScriptedExecutor:
    """Return the scripted executor, which the shard and the reference in the test's process both use."""
    return ScriptedExecutor(**{"vocab_size": 32, "num_blocks": 2048, "block_size": 4, **options})


def on_forward(plan: Any) -> None:
    if any(DEADLY_TOKEN in row.new_tokens for row in plan.rows):
        os._exit(3)
    time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--standby", action="store_true")
    options = parser.parse_args()
    die_with_parent(options.parent)
    if options.standby:
        wait_for_activation()
    if options.fail:
        sys.exit("no such model")
    sys.exit(run_shard(make_executor(on_forward=on_forward, num_blocks=1 << 15), options.listen, warm=False))
