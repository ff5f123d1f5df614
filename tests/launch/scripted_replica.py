"""A replica process with a scripted executor instead of a model, for tests of lost replicas."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from bridle.config import EngineConfig
from bridle.distributed.child_process import die_with_parent
from bridle.distributed.replica_server import serve_replica
from bridle.engine import AsyncEngine, Engine
from tests.launch.scripted_shard import STEP_SECONDS, make_executor


def on_forward(plan: Any) -> None:
    time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True, type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, default=1 << 15)
    options = parser.parse_args()
    die_with_parent(options.parent)
    config = EngineConfig()
    with AsyncEngine(Engine(make_executor(on_forward=on_forward, num_blocks=options.num_blocks), config)) as engine:
        serve_replica(engine, config, options.listen)
