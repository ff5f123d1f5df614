"""Shards that compute a model together: rank 0 speaks to the router, and tells the others what it is told.

The others are rank 0's child processes. Plans reach them through pipes, which have no time limit while nothing is to be
done; within a forward pass they meet in collectives, which have one. When one of them ends, all do, and whoever started
rank 0 starts the group again.
"""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import threading
from collections.abc import Sequence
from typing import BinaryIO

from bridle.cluster.plans import decode_plan, encode_plan
from bridle.cluster.proto import shard_pb2 as pb
from bridle.engine.interfaces import Executor, ExecutorInfo
from bridle.engine.plan import SampleBatch, StepPlan, StepResult
from bridle.errors import BridleError, InternalError, ShardUnavailable

_log = logging.getLogger(__name__)

#: Exit status of a group that lost one of its processes.
MEMBER_LOST = 76
_HEADER = struct.Struct(">I")


class Members:
    """The processes of ranks 1 and up. This process ends at once if one of them does."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._is_closed = False
        self._commands = commands
        self._processes: list[subprocess.Popen[bytes]] = []
        self._are_started = threading.Event()
        # To the system the thread that starts them is their parent, so it lives as long as they do.
        self._thread = threading.Thread(target=self._run, name="bridle-members", daemon=True)
        self._thread.start()
        self._are_started.wait()

    def _run(self) -> None:
        for command in self._commands:
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))  # noqa: S603
        self._are_started.set()
        watchers = [
            threading.Thread(target=self._watch, args=(rank, process), daemon=True)
            for rank, process in enumerate(self._processes, 1)
        ]
        for watcher in watchers:
            watcher.start()
        for watcher in watchers:
            watcher.join()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._is_closed:
            _log.error("rank %d (pid %d) ended with status %d: the group ends", rank, process.pid, status)
            os._exit(MEMBER_LOST)  # the other threads may wait for it in a collective

    def tell(self, request: pb.StepRequest) -> None:
        """Send a request to all of them."""
        data = request.SerializeToString()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(_HEADER.pack(len(data)) + data)
            process.stdin.flush()

    def close(self) -> None:
        """End them."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
        self._thread.join()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()


class GroupExecutor:
    """Implements `Executor` over this process's part of a model and those of `members`."""

    def __init__(self, executor: Executor, members: Members) -> None:
        self._executor = executor
        self._members = members

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    @property
    def num_bytes(self) -> int:
        """Of this process's part."""
        return getattr(self._executor, "num_bytes", 0)

    def forward(self, plan: StepPlan) -> None:
        """All ranks run the plan. What goes wrong in the middle of it leaves them out of step: the group is lost."""
        try:
            self._members.tell(pb.StepRequest(plan=encode_plan(plan)))
            self._executor.forward(plan)
        except OSError as error:
            raise ShardUnavailable(f"a rank of the group is gone: {error}") from error
        except InternalError as error:
            if error.__cause__ is None:  # the plan was refused before anything began, by every rank alike
                raise
            raise ShardUnavailable(f"the group is out of step: {error}") from error

    def sample(self, batch: SampleBatch) -> StepResult:
        """This rank has all the logits."""
        return self._executor.sample(batch)

    def reset(self) -> None:
        self._members.tell(pb.StepRequest(reset=pb.Reset()))
        self._executor.reset()

    def close(self) -> None:
        self._members.close()
        self._executor.close()


def follow(executor: Executor, source: BinaryIO) -> int:
    """What ranks 1 and up do: run what rank 0 runs, until it is gone. Gives the exit status."""
    while header := source.read(_HEADER.size):
        (size,) = _HEADER.unpack(header)
        request = pb.StepRequest.FromString(source.read(size))
        if request.WhichOneof("kind") == "reset":
            executor.reset()
            continue
        try:
            executor.forward(decode_plan(request.plan))
        except BridleError as error:
            if error.__cause__ is not None:
                _log.error("this rank is out of step: %s", error)
                return MEMBER_LOST
    return 0
