"""Runs a model in a separate process: starts and connects the shard, and restarts it if it ends or hangs.

    executor = launch_shard(ModelConfig("demo"))

The returned executor manages the process. The user of the executor need not know about the process.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields

from bridle.config import ModelConfig
from bridle.distributed.address import Tls
from bridle.distributed.link import Timings
from bridle.distributed.remote_executor import ShardExecutor
from bridle.engine.interfaces import Sampler
from bridle.errors import InvalidRequest, ShardUnavailable, UnsupportedFeature
from bridle.launch.sockets import make_socket_folder
from bridle.launch.supervised_process import SupervisedProcess, describe
from bridle.load_progress import Report, silent

_log = logging.getLogger(__name__)

#: The time limit for loading a model, in seconds.
START_SECONDS = 600.0
#: A model that was loaded once is on this machine. With this variable, a restarted process does not contact the hub, so
#: it cannot get another version.
FETCHED = {"HF_HUB_OFFLINE": "1"}
_WHAT = {"step_tokens": "prompt tokens", "step_seqs": "sequences"}


class LaunchedShard(ShardExecutor):
    """A shard executor that owns its shard's process. If `stands_by`, the executor also owns a standby process, which
    replaces the shard's process when that process ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "shard",
        timings: Timings | None = None,
        start_timeout: float = START_SECONDS,
        stands_by: bool = False,
    ) -> None:
        """Create the executor. `command` starts the shard; the executor adds `--listen ADDRESS --parent PID` to it. If
        `stands_by`, the executor also adds `--standby`, and the shard waits for a line on its standard input."""
        self._folder = make_socket_folder()
        address = f"unix:{self._folder / 'shard.sock'}"
        command = [*command, "--listen", address, "--parent", str(os.getpid()), *(["--standby"] if stands_by else [])]
        self.child = SupervisedProcess(name, command, stands_by=stands_by)
        try:
            super().__init__(
                address,
                timings=timings,
                start_timeout=start_timeout,
                is_starting=lambda: not self.child.has_failed,
                on_loss=self._end_shard,
                on_proven=self.child.prove,
            )
        except ShardUnavailable as error:
            raise self._start_failed(error) from None
        except BaseException:
            self._clean_up()
            raise
        self.child.environment = FETCHED
        self.child.keep()

    def _start_failed(self, error: ShardUnavailable) -> ShardUnavailable:
        status = self.child.status
        self._clean_up()
        if status is None:
            return error
        return ShardUnavailable(f"the {self.child.name} ended while it started, {describe(status)}; see its log above")

    def _end_shard(self, pid: int | None, reason: str) -> None:
        """Kill the process of a lost shard, so that a new process replaces it."""
        self.child.kill(pid)

    def close(self) -> None:
        """Disconnect from the shard, and end its process. Idempotent."""
        super().close()
        self._clean_up()

    def _clean_up(self) -> None:
        self.child.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def launch_shard(
    config: ModelConfig,
    progress: Report | None = None,
    sampler: Sampler | None = None,
    *,
    shards: int = 1,
    stands_by: bool = True,
) -> ShardExecutor:
    """Start a model in a separate process on this machine, or in `shards` processes, each with a part of every layer.
    The returned executor is ready. If `stands_by`, a single shard has a standby process, which has finished its
    imports. Raises `ShardUnavailable` if the shard does not start."""
    _refuse_sampler(sampler)
    _refuse_draft_model(config)
    report = progress or silent
    report("starting a shard", 0.0)
    command = [sys.executable, "-m", "bridle", "shard", *shard_arguments(config)]
    if shards > 1:
        command += ["--shards", str(shards)]
    name = "shard" if shards == 1 else f"group of {shards} shards"
    executor = LaunchedShard(command, name=name, stands_by=stands_by and shards == 1)
    if config.num_blocks is None:  # a restarted shard must have the same KV blocks, whatever memory is free then
        executor.child.command += ["--num-blocks", str(executor.info.num_blocks)]
    try:
        report("ready", 1.0)
    except BaseException:  # the shard is not needed any more
        executor.close()
        raise
    return executor


def connect_shard(
    address: str, tls: Tls | None = None
) -> Callable[[ModelConfig, Report | None, Sampler | None], ShardExecutor]:
    """Return a function that connects to a running shard instead of loading a model."""

    def reach(config: ModelConfig, progress: Report | None, sampler: Sampler | None) -> ShardExecutor:
        _refuse_sampler(sampler)
        _refuse_draft_model(config)
        executor = ShardExecutor(address, tls=tls, start_timeout=START_SECONDS)
        try:
            _check_room(executor, config)
        except InvalidRequest:
            executor.close()
            raise
        return executor

    return reach


def _check_room(executor: ShardExecutor, config: ModelConfig) -> None:
    """Raise `InvalidRequest` if a step may need more memory than the running shard has reserved."""
    for name, wanted, room in (
        ("step_tokens", config.step_tokens, executor.info.max_num_batched_tokens),
        ("step_seqs", config.step_seqs, executor.info.max_num_seqs),
    ):
        if wanted is not None and wanted > room:
            raise InvalidRequest(
                f"a step needs {wanted} {_WHAT[name]}, but the shard at {executor.address} has memory for {room}: "
                f"start the shard with --{name.replace('_', '-')} {wanted}",
                name,
            )


def _refuse_sampler(sampler: Sampler | None) -> None:
    if sampler is not None:
        raise UnsupportedFeature("sampler: a custom sampler needs the model in this process", "sampler")


def _refuse_draft_model(config: ModelConfig) -> None:
    """Refuse a draft model, because calling it between steps in another process would be too slow."""
    if config.draft_model is not None:
        raise UnsupportedFeature(
            "a draft model needs the model in this process: leave out --isolate-model, --shard and "
            "--shards, or use --replicas",
            "draft_model",
        )


def shard_arguments(config: ModelConfig) -> list[str]:
    """Return the arguments of `bridle shard` for a model configuration. Images and control vectors are left out,
    because the router handles them."""
    default = ModelConfig()
    arguments = [config.model]
    for field in fields(ModelConfig):
        value = getattr(config, field.name)
        if field.name not in ("model", "tokenizer", "image_hosts", "control_vectors") and value != getattr(
            default, field.name
        ):
            flag = field.name.replace("_", "-")
            arguments += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return arguments
