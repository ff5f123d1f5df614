"""Several processes, the ranks, that compute one model together. Rank 0 gets step plans from the router and passes them
on to the other ranks.

All other ranks are child processes of rank 0. Plans are sent to the child processes through pipes, which have no time
limit, because a group may be idle. Within a forward pass the ranks use collective operations, which have a time limit.
Each rank sends heartbeats from its own thread. If one rank ends or sends no heartbeats, all ranks end, and the parent
of rank 0 restarts the group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import struct
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import IO, BinaryIO

from bridle.distributed.adapter_calls import CalledDevice, load, unload
from bridle.distributed.child_process import child_environment
from bridle.distributed.codec.control_vectors import SentVectors, find_vectors, receive_vector
from bridle.distributed.codec.embeddings import require_embedder
from bridle.distributed.codec.step_plan import decode_plan, encode_plan
from bridle.distributed.group_media import GroupMedia, MemberMedia
from bridle.distributed.media_calls import find_media
from bridle.distributed.member_adapters import RankAdapterLoader
from bridle.distributed.proto import shard_pb2 as pb
from bridle.distributed.stall_detector import HELD_UP_SECONDS, is_held_up
from bridle.engine.interfaces import Executor, ExecutorInfo
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.errors import BridleError, InternalError, ShardUnavailable
from bridle.lora import find_device

_log = logging.getLogger(__name__)

#: Exit status of a group that lost one of its processes.
MEMBER_LOST = 76
_HEADER = struct.Struct(">I")


#: Seconds between two heartbeats of a rank, and the seconds of silence after which a rank counts as hung.
_BEAT_SECONDS, SILENCE_SECONDS = 0.25, 1.0


def end_group(reason: str) -> None:
    """End this process at once. An orderly exit could hang: other threads may wait for a lost rank in a collective."""
    _log.error("%s: the tensor-parallel group ends", reason)
    os._exit(MEMBER_LOST)


class Members:
    """The child processes of rank 0: ranks 1 and up.

    `on_loss(reason)` is called when a rank has ended or hangs, from the thread that watches this rank. Several threads
    may call `on_loss` at the same time.
    """

    def __init__(self, commands: Sequence[Sequence[str]], on_loss: Callable[[str], None] = end_group) -> None:
        self._is_closed = False
        self._commands = commands
        self._on_loss = on_loss
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sending = threading.Lock()
        self._are_started = threading.Event()
        self._seen = threading.Semaphore(0)  # released once by each rank that has sent a heartbeat or has ended
        # Linux treats the thread that starts a process as its parent. So this thread must live as long as the ranks.
        self._thread = threading.Thread(target=self._run, name="bridle-members", daemon=True)
        self._thread.start()
        self._are_started.wait()

    def _run(self) -> None:
        for command in self._commands:
            # Each rank has its own process session. So Ctrl-C in a terminal reaches only rank 0, which then ends the
            # other ranks.
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment(), start_new_session=True
            )
            self._processes.append(process)
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
        """Watch one rank until its process ends or sends no heartbeats. A rank sends nothing while it loads, so only
        the time after its first heartbeat counts."""
        assert process.stdout is not None
        silence: float | None = None
        while _is_heard(process.stdout, process.pid, silence):
            is_alive = bool(os.read(process.stdout.fileno(), 1 << 10))
            status = None if is_alive else process.wait()
            if silence is None:
                self._seen.release()
            if status is not None:
                self._lose(f"rank {rank} (pid {process.pid}) ended with status {status}")
                return
            silence = SILENCE_SECONDS
        self._lose(f"no sign of life from rank {rank} (pid {process.pid}) for {SILENCE_SECONDS:g} s or more")
        process.wait()

    def _lose(self, reason: str) -> None:
        if not self._is_closed:
            self._on_loss(reason)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of ranks 1 and up, in order of rank."""
        return [process.pid for process in self._processes]

    def wait(self) -> None:
        """Wait until each rank has sent a heartbeat or has ended."""
        for _ in self._commands:
            self._seen.acquire()

    def broadcast(self, request: pb.StepRequest) -> None:
        """Send a request to all ranks. Safe from any thread."""
        data = request.SerializeToString()
        with self._sending:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(_HEADER.pack(len(data)) + data)
                process.stdin.flush()

    def close(self) -> None:
        """End the processes of all ranks."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
        self._thread.join()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # data that could not be sent is dropped
                        pipe.close()


def _is_heard(source: IO[bytes], pid: int, silence: float | None) -> bool:
    """Wait for data from a process. Returns False if the process sent nothing for `silence` seconds; the limit is
    longer while the process waits for a busy machine."""
    until = time.monotonic() + HELD_UP_SECONDS
    while not select.select([source], [], [], silence)[0]:
        if time.monotonic() > until or not is_held_up(pid):
            return False
    return True


class GroupExecutor:
    """Implements `Executor`: rank 0 computes its own part of the model while `members` compute theirs."""

    def __init__(self, executor: Executor, members: Members) -> None:
        self._executor = executor
        self._members = members
        device = find_device(executor)
        self.adapters = CalledDevice({} if device is None else device.layers, self._load, self._unload)
        media = find_media(executor)
        self.media = None if media is None else GroupMedia(media, members.broadcast)
        self.control_vectors = find_vectors(executor)  # rank 0's; the other ranks get the vectors that plans name
        self._sent = SentVectors(self.control_vectors)

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    @property
    def num_bytes(self) -> int:
        """Return the memory of rank 0's part of the model, in bytes."""
        return getattr(self._executor, "num_bytes", 0)

    def forward(self, plan: StepPlan) -> None:
        """Run the plan on all ranks. An error during a plan leaves the ranks in different states, so it ends the
        group."""
        try:
            for message in self._sent.messages(plan):
                self._members.broadcast(message)
            self._members.broadcast(pb.StepRequest(plan=encode_plan(plan)))
            self._executor.forward(plan)
        except OSError as error:
            raise ShardUnavailable(f"a rank of the tensor-parallel group has ended: {error}") from error
        except InternalError as error:
            if error.__cause__ is None:  # every rank refused the plan in the same way, before any of them began
                raise
            raise ShardUnavailable(f"a rank of the tensor-parallel group did not run the same step: {error}") from error

    def sample(self, batch: SampleBatch) -> StepResult:
        """Sample tokens on rank 0, which has all logits."""
        return self._executor.sample(batch)

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Return the embedding vectors of prompts from rank 0, which has the complete hidden states and the whole
        head."""
        return require_embedder(self._executor).embed(step, logits_rows)

    def reset(self) -> None:
        self._members.broadcast(pb.StepRequest(reset=pb.Reset()))
        self._executor.reset()

    def _load(self, request: pb.LoadAdapterRequest) -> None:
        """Load the adapter on rank 0. The other ranks load the adapter only if rank 0 succeeded."""
        load(self._executor, request)
        self._members.broadcast(pb.StepRequest(load_adapter=request))

    def _unload(self, request: pb.UnloadAdapterRequest) -> None:
        unload(self._executor, request)
        self._members.broadcast(pb.StepRequest(unload_adapter=request))

    def close(self) -> None:
        self._members.close()
        self._executor.close()


def beat(sink: BinaryIO) -> None:
    """Start a thread that writes heartbeats to `sink`, so that they continue while a step is computed."""

    def run() -> None:
        try:
            while True:
                sink.write(b".")
                sink.flush()
                time.sleep(_BEAT_SECONDS)
        except (OSError, ValueError):  # rank 0 has ended
            return

    threading.Thread(target=run, name="bridle-beat", daemon=True).start()


def follow(executor: Executor, source: BinaryIO) -> int:
    """Run the main loop of a rank other than 0: execute rank 0's requests until rank 0 ends. Returns the exit
    status."""
    adapters, media = RankAdapterLoader(executor), MemberMedia(executor)
    while header := source.read(_HEADER.size):
        (size,) = _HEADER.unpack(header)
        request = pb.StepRequest.FromString(source.read(size))
        if request.WhichOneof("kind") == "reset":
            executor.reset()
            continue
        try:
            if adapters.handle(request) or media.handle(request):
                continue
            if request.HasField("control_vector"):
                receive_vector(executor, request.control_vector)
                continue
            plan = decode_plan(request.plan)
            adapters.await_plan(plan)
        except Exception as error:
            _log.error("this rank cannot load an adapter, image or control vector that rank 0 has: %s", error)
            return MEMBER_LOST
        try:
            executor.forward(plan)
        except BridleError as error:
            if error.__cause__ is not None:
                _log.error("this rank cannot run the same step as rank 0: %s", error)
                return MEMBER_LOST
    return 0
