"""A fake of a GPU's memory: a driver, and torch's caching allocator above it. Freed memory stays reserved until the
cache is emptied, so the driver counts it as used. A graph's memory is in a pool of its own until the graph goes.

Sizes are rounded and segments are split as in c10/cuda/CUDACachingAllocator.cpp: small ones come from segments of
2 MiB, middling ones from 20 MiB, larger ones are multiples of 2 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from bridle.model import memory

MIB = 1 << 20


class GraphPool:
    """The memory pool of CUDA graphs, which is reserved as long as the graphs exist."""


@dataclass(eq=False)
class _Segment:
    size: int
    pool: ref[GraphPool] | None
    is_small: bool
    #: Free and taken parts in order: [size, is taken].
    parts: list[list[Any]] = field(default_factory=list)


class Memory:
    """A fake allocation of device memory, which is freed when no object refers to it."""

    def __init__(self, card: Card, segment: _Segment, part: list[Any]) -> None:
        self._card, self._segment, self._part = card, segment, part

    def __del__(self) -> None:
        self._part[1] = False
        parts = self._segment.parts
        at = next(number for number, part in enumerate(parts) if part is self._part)
        for first in (at, at - 1):  # joins it with its neighbors
            if 0 <= first < len(parts) - 1 and not parts[first][1] and not parts[first + 1][1]:
                parts[first][0] += parts.pop(first + 1)[0]


class Driven:
    """Memory allocated from the fake driver without torch, like that of a CUDA graph's nodes."""

    def __init__(self, card: Card, size: int) -> None:
        self._card, self._size = card, size
        card.take(size)

    def __del__(self) -> None:
        self._card.driven -= self._size


class Card:
    """A fake GPU with `total` bytes of memory, part of which the CUDA context uses."""

    def __init__(self, total: int, context: int = 500 * MIB) -> None:
        self._total, self.driven, self.peak = total, context, 0
        self._segments: list[_Segment] = []
        self.captures_underway = False  # a capture that failed and was not undone

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self._segments)

    @property
    def free(self) -> int:
        return self._total - self.driven - self.reserved

    def take(self, size: int) -> None:
        if size > self.free:
            self.empty_cache()
        if size > self.free:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {size} of {self.free}")
        self.driven += size

    def allocate(self, size: int, graphs: GraphPool | None = None) -> Memory:
        """Allocate memory from torch's fake caching allocator, as `torch.empty` does."""
        size = -(-max(size, 1) // 512) * 512
        is_small = size <= MIB
        pool = None if graphs is None else ref(graphs)
        fits = [
            (part[0], segment, part)
            for segment in self._segments
            if segment.pool == pool and segment.is_small is is_small
            for part in segment.parts
            if not part[1] and part[0] >= size
        ]
        if fits:
            _, segment, part = min(fits, key=lambda fit: fit[0])
        else:
            segment = self._segment(size, pool, is_small)
            part = segment.parts[0]
        left = part[0] - size
        if left >= 512 if is_small else left > MIB:
            segment.parts.insert(next(n for n, each in enumerate(segment.parts) if each is part) + 1, [left, False])
            part[0] = size
        part[1] = True
        return Memory(self, segment, part)

    def _segment(self, size: int, pool: ref[GraphPool] | None, is_small: bool) -> _Segment:
        large = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        size = 2 * MIB if is_small else large
        self.take(size)
        self.driven -= size
        segment = _Segment(size, pool, is_small, [[size, False]])
        self._segments.append(segment)
        self.peak = max(self.peak, self.reserved)
        return segment

    def empty_cache(self) -> None:
        if self.captures_underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self._segments = [each for each in self._segments if _is_kept(each)]

    def reset_peak(self) -> None:
        self.peak = self.reserved

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace torch's functions for GPU memory by functions of this fake GPU."""
        stands = {
            "mem_get_info": lambda _: (self.free, self._total),
            "synchronize": lambda _=None: None,
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": lambda _: self.reset_peak(),
            "max_memory_reserved": lambda _: self.peak,
            "memory_reserved": lambda _: self.reserved,
        }
        for name, stand in stands.items():
            patch.setattr(torch.cuda, name, stand)
        patch.setattr(memory, "gc", SimpleNamespace(collect=lambda: None))  # fakes are in no cycles


def _is_kept(segment: _Segment) -> bool:
    has_graphs = segment.pool is not None and segment.pool() is not None
    return has_graphs or any(taken for _, taken in segment.parts)
