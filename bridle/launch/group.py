"""Runs a model on several shard processes: rank 0 starts the other ranks, and each rank loads its part of the model."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bridle.cgroups import num_cores
from bridle.config import ModelConfig
from bridle.distributed.group import GroupExecutor, Members, beat, follow
from bridle.errors import InvalidRequest
from bridle.launch.launcher import shard_arguments
from bridle.launch.sockets import STORE, make_socket_folder

#: Seconds that a rank waits, so that rank 0 can report why the group failed.
REFUSAL_SECONDS = 60.0


def load_group(config: ModelConfig, count: int) -> GroupExecutor:
    """Start the other ranks of a model that `count` processes compute together. This process is rank 0. Returns the
    group's executor. Raises errors of loading."""
    from bridle.model import load_executor

    if count < 1:
        raise InvalidRequest(f"shards is {count}; must be at least 1", "shards")
    if config.backend != "torch":
        raise InvalidRequest(f"backend {config.backend!r} runs a model in one process; set shards to 1", "shards")
    folder = make_socket_folder()
    with ExitStack() as undo:
        members = Members([_command(config, count, rank, folder / STORE) for rank in range(1, count)])
        undo.callback(members.close)
        try:
            config = _join(config, count, 0, folder / STORE)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        executor = GroupExecutor(load_executor(config), members)
        members.wait()
        undo.pop_all()
    return executor


def run_member(config: ModelConfig, count: int, rank: int, store: Path | None) -> int:
    """Run a rank above 0 until rank 0 has ended. Returns the exit status."""
    from bridle.model import load_executor

    if store is None:
        raise InvalidRequest("rank: ranks above 0 are started by rank 0; run the command without a rank", "rank")
    try:
        config = _join(config, count, rank, store)
    except InvalidRequest:
        time.sleep(REFUSAL_SECONDS)  # rank 0 reports the same error clearly, and ends this process
        raise
    executor = load_executor(config)
    beat(sys.stdout.buffer)
    return follow(executor, sys.stdin.buffer)


def _join(config: ModelConfig, count: int, rank: int, store: Path) -> ModelConfig:
    """Join the group of ranks. Returns the configuration with this rank's device."""
    from bridle.model.device_defaults import choose_devices
    from bridle.model.tensor_parallel import join_group

    device = choose_devices(config.device, count)[rank]
    threads = config.num_threads or max(num_cores() // count, 1)
    join_group(store, rank, count, device)
    return replace(config, device=str(device), num_threads=threads)


def _command(config: ModelConfig, count: int, rank: int, store: Path) -> list[str]:
    place = ["--shards", str(count), "--rank", str(rank), "--store", str(store), "--parent", str(os.getpid())]
    return [sys.executable, "-m", "bridle", "shard", *shard_arguments(config), *place]
