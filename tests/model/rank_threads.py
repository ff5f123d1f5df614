"""Runs tensor-parallel ranks as threads of one process, over a fake `torch.distributed`. The fake has neither gloo's
nor NCCL's peculiarities. A sum of tensors with different sizes or types raises an error, as on GPUs it would hang or
mix up numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bridle.model import support_checks, tensor_parallel
from bridle.model.checkpoint import inspect_checkpoint
from bridle.model.geometry import Geometry, discover_geometry
from bridle.model.loader import lower_model, read_model
from tests.fakes import tiny_checkpoints
from tests.waiting import PATIENCE

T = TypeVar("T")
CPU = torch.device("cpu")
#: The library sets the process's number type while it reads.
_reading = threading.Lock()


class Ranks:
    """`count` ranks that run one function. `sums` has the size and type of each tensor that rank 0 added up with the
    others."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sums: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.gathers: list[tuple[int, ...]] = []  # the sizes of each rank's part of what rank 0 has gathered
        self._own = threading.local()
        self._given: list[Tensor] = [torch.empty(0)] * count
        self._meeting = threading.Barrier(count, timeout=PATIENCE)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Run `work(rank)` in each rank; return the results by rank, or raise the first error."""

        def one(rank: int) -> T:
            self._own.rank = rank
            try:
                return work(rank)
            except BaseException:
                self._meeting.abort()
                raise

        names = {
            "get_rank": lambda: self._own.rank,
            "get_world_size": lambda: self.count,
            "is_initialized": lambda: True,
            "all_reduce": self._all_reduce,
            "all_gather_into_tensor": self._all_gather,
            "all_gather_single": self._all_gather,
        }
        with ExitStack() as stack, ThreadPoolExecutor(self.count) as threads:
            for name, stand_in in names.items():
                stack.enter_context(patch.object(dist, name, stand_in, create=True))
            doing = [threads.submit(one, rank) for rank in range(self.count)]
            errors = [error for each in doing if (error := each.exception()) is not None]
            for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
                raise error
            return [each.result() for each in doing]

    def _all_gather(self, whole: Tensor, part: Tensor) -> None:
        self._given[self._own.rank] = part
        self._meeting.wait()
        made = torch.stack(list(self._given))
        if self._own.rank == 0:
            self.gathers.append(tuple(part.shape))
        self._meeting.wait()
        whole.copy_(made.view(whole.shape))

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        self._given[self._own.rank] = tensor
        self._meeting.wait()
        given = list(self._given)
        if any((each.numel(), each.dtype) != (tensor.numel(), tensor.dtype) for each in given):
            raise AssertionError(f"ranks add up {[(tuple(each.shape), each.dtype) for each in given]}")
        if self._own.rank == 0:
            self.sums.append((tuple(tensor.shape), tensor.dtype))
        parts = torch.stack([each.reshape(-1) for each in given])
        made = parts.amin(0) if op == dist.ReduceOp.MIN else parts.sum(0)
        self._meeting.wait()
        tensor.copy_(made.view(tensor.shape))


def part_of(family: str, dtype: torch.dtype, *, is_lean: bool) -> tuple[nn.Module, Geometry]:
    """Return this rank's part of a tiny model, split as the loader splits it."""
    checkpoint = inspect_checkpoint(tiny_checkpoints.cached_checkpoint(family))
    settings = support_checks.read_config(checkpoint)
    with _reading:
        model = read_model(checkpoint, settings, dtype, CPU)
    count = tensor_parallel.num_ranks()
    if count > 1:
        tensor_parallel.split_model(model, tensor_parallel.read_plan(settings, count))
    geometry = discover_geometry(model, settings.num_hidden_layers, CPU)
    if is_lean:
        with tensor_parallel.unsummed():
            lower_model(model, geometry)
    return model, geometry
