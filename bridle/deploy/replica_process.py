"""The process of one replica: a whole engine, for a router to use. Started by `bridle.deploy.replicas`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import msgspec

from bridle.cluster.parent import die_with_parent
from bridle.config import EngineConfig, ModelConfig
from bridle.errors import BridleError


class ReplicaConfig(msgspec.Struct):
    """What a replica is told, as JSON on its command line."""

    model: ModelConfig
    engine: EngineConfig
    shards: int = 0  # processes of the replica's own for its model; 0: in this one
    log_format: str = "auto"
    log_level: str = "info"


def main() -> int:
    """Load, serve until a signal comes; gives the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True, type=Path)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--config", required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    config = msgspec.json.decode(options.config, type=ReplicaConfig)
    from bridle.cluster.replica_server import serve_replica
    from bridle.deploy.launcher import launch_shard
    from bridle.http.logs import configure_logs
    from bridle.service import load_model

    configure_logs(config.log_format, config.log_level)  # type: ignore[arg-type]
    try:
        executors = partial(launch_shard, shards=config.shards) if config.shards else None
        model = load_model(config.model, config.engine, executors=executors)
    except BridleError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    try:
        serve_replica(model.client, config.engine, options.listen)
    finally:
        model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
