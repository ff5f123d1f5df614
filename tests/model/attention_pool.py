"""KV caches for tests of attention kernels, and the plain attention that kernels are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.model.batch_inputs import PackedStep, pack_step
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels.interface import AttentionKernel
from bridle.model.kernels.reference import ReferenceKernel
from bridle.model.kv_cache import KVCache, LayerCache
from bridle.model.sequence_state import CachedRequestState

CPU = torch.device("cpu")


@dataclass
class Pool:
    """A KV cache of one layer with its blocks in random order, and the sequences that use the cache."""

    shape: LayerGeometry
    block_size: int
    free: list[int]
    mirrors: list[CachedRequestState] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        geometry = Geometry({0: self.shape}, vocab_size=2)
        self.cache = KVCache(geometry, len(self.free), self.block_size, torch.float32, CPU)
        self.generator = torch.Generator().manual_seed(len(self.free))
        # Unwritten memory must never matter.
        self.layer.keys.fill_(float("nan"))
        self.layer.values.fill_(float("nan"))

    @property
    def layer(self) -> LayerCache:
        return self.cache.layers[0]

    def grow(self, number: int, length: int) -> PlanRow:
        mirror = self.mirrors[number]
        start = self.computed[number]
        mirror.keep_tokens(start)
        mirror.tokens.extend([1] * length)
        needed = -(-(start + length) // self.block_size) - len(mirror.blocks)
        mirror.add_blocks(self.free.pop() for _ in range(needed))
        self.computed[number] += length
        return PlanRow(number, start, length)

    def fork(self, number: int) -> None:
        """Copy a sequence with all its blocks, so that both copies may write."""
        twin = self.mirrors[number].copy(self.computed[number], len(self.mirrors[number].blocks))
        pairs = [(block, self.free.pop()) for block in twin.blocks]
        if pairs:
            self.cache.copy_blocks(pairs)
        twin.keep_blocks(0)
        twin.add_blocks(target for _, target in pairs)
        self.mirrors.append(twin)
        self.computed.append(self.computed[number])

    def truncate(self, number: int, length: int) -> None:
        mirror = self.mirrors[number]
        keep = -(-length // self.block_size)
        self.free.extend(mirror.blocks[keep:])
        mirror.keep_blocks(keep)
        self.computed[number] = length

    def compute(self, rows: list[PlanRow]) -> tuple[PackedStep, Tensor]:
        """Write the rows' random keys and values to the cache; return the step and random queries [T, Hq, D]."""
        step = pack_step(rows, [self.mirrors[row.seq_id] for row in rows], self.block_size, CPU)
        total, shape = step.num_tokens, self.shape
        key = self.draw(total, shape.num_kv_heads, shape.key_dim)
        self.layer.write(step.slots, key, self.draw(total, shape.num_kv_heads, shape.value_dim))
        return step, self.draw(total, shape.num_heads, shape.key_dim)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


def attend(kernel: AttentionKernel, pool: Pool, step: PackedStep, query: Tensor, options: AttentionOptions) -> Tensor:
    kernel.begin(step)
    return kernel.attend(query, pool.layer, options)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 1)]))
    dim, value_dim = draw(st.sampled_from([(8, 8), (16, 16), (12, 8)]))
    block_size = draw(st.integers(1, 5))
    free = list(range(200))
    draw(st.randoms(use_true_random=False)).shuffle(free) if draw(st.booleans()) else free.reverse()
    return Pool(LayerGeometry(kv_heads * group, kv_heads, dim, value_dim), block_size, free)


@st.composite
def layer_options(
    draw: st.DrawFn, num_heads: int, softcaps: tuple[float | None, ...] = (None, 2.0), may_sink: bool = True
) -> AttentionOptions:
    sinks = torch.linspace(-1, 2, num_heads) if may_sink and draw(st.booleans()) else None
    return AttentionOptions(
        scaling=draw(st.sampled_from([0.2, 0.35])),
        window=draw(st.none() | st.integers(1, 12)),
        softcap=draw(st.sampled_from(softcaps)),
        sinks=sinks,
    )


def check_kernel(kernel: AttentionKernel, data: st.DataObject, **limits: Any) -> None:
    """Compare `kernel` with the reference over steps in which several sequences grow, fork and shrink."""
    pool = data.draw(pools())
    for _ in range(data.draw(st.integers(1, 3))):
        pool.mirrors.append(CachedRequestState())
        pool.computed.append(0)
    for _ in range(data.draw(st.integers(1, 4))):
        _disturb(pool, data)
        lengths = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 7]), min_size=1, max_size=len(pool.mirrors)))
        rows = [pool.grow(number, length) for number, length in enumerate(lengths) if length]
        if not rows:
            continue
        step, query = pool.compute(rows)
        options = data.draw(layer_options(pool.shape.num_heads, **limits))
        want = attend(ReferenceKernel(), pool, step, query, options)
        have = attend(kernel, pool, step, query, options)
        assert have.shape == (step.num_tokens, pool.shape.num_heads, pool.shape.value_dim)
        torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-4)


def _disturb(pool: Pool, data: st.DataObject) -> None:
    """At random, fork a sequence, roll some of its tokens back, or do nothing."""
    number = data.draw(st.integers(0, len(pool.mirrors) - 1))
    what = data.draw(st.sampled_from(["nothing", "fork", "truncate"]))
    if what == "fork" and len(pool.mirrors) < 5:
        pool.fork(number)
    elif what == "truncate" and pool.computed[number]:
        pool.truncate(number, data.draw(st.integers(0, pool.computed[number] - 1)))
