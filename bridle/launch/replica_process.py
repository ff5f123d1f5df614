"""The process of one replica, which is a whole engine for a router. `bridle.launch.replicas` starts this process."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from bridle.config import EngineConfig, ModelConfig
from bridle.distributed.child_process import die_with_parent
from bridle.distributed.remote_tools import RemoteToolExecutor
from bridle.distributed.tool_messages import ToolsElsewhere
from bridle.distributed.watchdog import WatchedExecutor
from bridle.engine.interfaces import Sampler
from bridle.errors import BridleError
from bridle.load_progress import Report
from bridle.logs import LogFormat, configure_logs, configure_logs_as_told, log_failures
from bridle.serving.controller_runtime import ControlSettings
from bridle.serving.models.engine_factory import ExecutorLoader

_log = logging.getLogger(__name__)

#: The exit status of a replica whose model hangs in a step.
STUCK = 77


class ReplicaConfig(msgspec.Struct):
    """The settings of a replica, passed as JSON on the command line of its process."""

    model: ModelConfig
    engine: EngineConfig
    shards: int = 0  # shard processes of the replica; 0: the replica's own process
    control: ControlSettings = ControlSettings("off")
    tools: ToolsElsewhere = ToolsElsewhere()  # the tools that the server runs for the replica's controllers
    log_format: LogFormat | None = None  # None: the format of the starting process

    def encode(self) -> str:
        """Encode the settings as JSON for `decode`."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def decode(cls, text: str) -> ReplicaConfig:
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))


def main() -> int:
    """Load the model, then serve until a signal arrives. Returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True, type=Path)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--config", required=True)
    parser.add_argument("--num-blocks", type=int)
    options = parser.parse_args()
    die_with_parent(options.parent)
    config = ReplicaConfig.decode(options.config)
    if options.num_blocks is not None:
        config.model = replace(config.model, num_blocks=options.num_blocks)
    from bridle.controllers.reasoning_gate import compile_grammar
    from bridle.distributed.replica_server import serve_replica
    from bridle.launch.launcher import launch_shard
    from bridle.serving import load_model

    configure_logs_as_told() if config.log_format is None else configure_logs(config.log_format)
    # A replica's shard needs no standby, because other replicas take over its requests.
    launch = partial(launch_shard, shards=config.shards, stands_by=False)
    executors: ExecutorLoader = launch if config.shards else load_watched
    desk = RemoteToolExecutor(config.tools)
    try:
        model = load_model(config.model, config.engine, control=config.control, executors=executors, tools=desk)
    except BridleError as error:
        _log.error("%s", error)
        return 1
    try:
        assert model.constraints is not None
        make_grammar = partial(compile_grammar, model.constraints)
        parts = model.adapter_pool, desk, model.control_vectors
        serve_replica(model.client, config.engine, options.listen, make_grammar, *parts)
    finally:
        model.close()
    return 0


def load_watched(config: ModelConfig, progress: Report | None, sampler: Sampler | None) -> WatchedExecutor:
    """Load a model into this process. If a step hangs, the process ends, and its router restarts it."""
    from bridle.backends import load_executor

    return WatchedExecutor(load_executor(config, progress, sampler), _end_stuck)


def _end_stuck(reason: str) -> None:
    _log.error("this replica ends, because its model is stuck: %s", reason)
    os._exit(STUCK)


if __name__ == "__main__":
    log_failures()
    sys.exit(main())
