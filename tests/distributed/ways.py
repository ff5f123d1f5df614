"""Setups with several processes, in which the engine's properties are tested.

Each setup provides a `Lab`, so the property tests are the same for all. `one shard` runs the executor in a shard, over
a stream. `two ranks` splits the model over two processes that add their parts with gloo. `two replicas` connects two
engines to a router, over sockets.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from bridle.distributed.group import GroupExecutor, Members
from bridle.distributed.proto import shard_pb2 as pb
from bridle.distributed.remote_executor import ShardExecutor
from bridle.engine.interfaces import Executor
from bridle.model.tensor_parallel import join_group
from bridle.testing.scripted import ScriptedExecutor
from tests.distributed.kit import hosted
from tests.distributed.replica_lab import ReplicaLab
from tests.distributed.scripted_ranks import Rank, options_of, resets_of
from tests.engine.support import Lab
from tests.waiting import until


class Way:
    """A setup for the tests of a module. `enter` lets the labs of one test use it, and `leave` closes their
    resources."""

    #: What a property of the engine's may be left out for, by name: it looks at what is elsewhere here.
    looks_inside: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.stack = ExitStack()

    def open(self) -> None: ...

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None:
        self.stack.close()

    @property
    def num_steps(self) -> int:
        """Return the number of steps that this setup computed."""
        raise NotImplementedError


class OneShard(Way):
    """A shard with a new stream for each engine. A new engine first closes the previous engine's stream."""

    def open(self) -> None:
        self._host = self.stack.enter_context(hosted(ScriptedExecutor()))
        self._last: ShardExecutor | None = None

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Lab, "connect", staticmethod(self._connect))

    def _connect(self, executor: Executor) -> Executor:
        self.leave()
        self._host.wait_free()
        self._last = self._host.connect(self.behind(executor))
        return self._last

    def behind(self, executor: Executor) -> Executor:
        """Return the executor that the shard serves."""
        return executor

    def leave(self) -> None:
        if self._last is not None:
            self._last.close()
            self._last = None

    @property
    def num_steps(self) -> int:
        return self._host.shard.num_steps


class TwoRanks(OneShard):
    """A tensor-parallel group: the shard is rank 0 in this process, and rank 1 is another process."""

    def open(self) -> None:
        super().open()
        folder = Path(tempfile.mkdtemp(prefix="bridle-test-"))
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store, self._options = folder / "store", folder / "options.json"
        self._number = 0
        self._write({})
        paths = ["--store", str(store), "--options", str(self._options), "--parent", str(os.getpid())]
        command = [sys.executable, "-m", "tests.distributed.scripted_ranks", *paths]
        self._members = CountingMembers([command], on_loss=self._note)
        self.stack.callback(self._members.close)
        join_group(store, 0, 2, torch.device("cpu"))
        self.stack.callback(dist.destroy_process_group)
        self.losses: list[str] = []

    def _note(self, reason: str) -> None:
        self.losses.append(reason)

    def _write(self, options: dict[str, Any]) -> None:
        self._number += 1
        fresh = self._options.with_suffix(".new")
        fresh.write_text(json.dumps({"number": self._number, **options}))
        fresh.replace(self._options)

    def behind(self, executor: Executor, **more: Any) -> Executor:
        # A lab whose forward passes had no collective may be over before rank 1 has begun it.
        until(lambda: self.losses or self._num_resets() == self._members.num_resets, "rank 1 to follow")
        assert not self.losses, self.losses
        assert isinstance(executor, ScriptedExecutor)
        self._write(options_of(executor) | more)  # rank 1 reads them at the next reset, which begins each stream
        return GroupExecutor(Rank(executor, 0), self._members)

    def _num_resets(self) -> int:
        """Return the number of resets on rank 1."""
        counted = resets_of(self._options)
        return int(counted.read_text()) if counted.exists() else 0


class CountingMembers(Members):
    """Group members that count the broadcast resets."""

    num_resets = 0

    def broadcast(self, request: pb.StepRequest) -> None:
        self.num_resets += request.WhichOneof("kind") == "reset"
        super().broadcast(request)


class TwoReplicas(Way):
    """Two engines, each with its own executor and controllers, and their router."""

    looks_inside = frozenset(
        {
            "test_n_outputs_share_one_prefill",
            "test_a_fork_copies_nothing_until_someone_writes",
            "test_forced_tokens_take_no_logits_row_of_their_own",
            "test_forced_tokens_ride_with_the_draws_of_others",
            "test_a_small_pool_preempts",
            "test_preempted_forks_come_back",
        }
    )

    def open(self) -> None:
        self._labs: list[ReplicaLab] = []
        self._num_steps = 0

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ReplicaLab.prepare(monkeypatch)
        monkeypatch.setattr(Lab, "make_engine", staticmethod(self._make))

    def _make(self, lab: Lab, config: Any, options: dict[str, Any]) -> Any:
        self.leave()
        self._labs.append(ReplicaLab(lab, config, options))
        return self._labs[0]

    def leave(self) -> None:
        while self._labs:
            lab = self._labs.pop()
            self._num_steps += lab.statistics().num_steps
            lab.close()

    @property
    def num_steps(self) -> int:
        return self._num_steps + sum(lab.statistics().num_steps for lab in self._labs)


WAYS: dict[str, type[Way]] = {"one shard": OneShard, "two ranks": TwoRanks, "two replicas": TwoReplicas}
