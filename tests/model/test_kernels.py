"""Kernels against the reference, over random plans: chunks, decodes, forks, truncations, scattered blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.model.batch_inputs import PackedStep, pack_step
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels import varlen
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kernels.interface import AttentionKernel
from bridle.model.kernels.masks import chunk_mask
from bridle.model.kernels.reference import ReferenceKernel
from bridle.model.kv_cache import KVCache, LayerCache
from bridle.model.sequence_state import CachedRequestState

CPU = torch.device("cpu")


@dataclass
class Pool:
    """A one-layer cache, blocks handed out from a shuffled list, and sequences that live in it."""

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
        """A copy that shares nothing it may write to: its blocks are copied."""
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
        """Write the rows' keys and values; gives the step and random queries [T, Hq, D]."""
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


@given(data=st.data())
def test_cpu_kernel_equals_reference(data: st.DataObject) -> None:
    check_kernel(CpuKernel(), data)


@given(data=st.data())
def test_flash_kernel_calls_as_documented(data: st.DataObject) -> None:
    """Without the device: the library's function is replaced by what its documentation says it computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "PAGE_MULTIPLE", 1)  # the restriction is the device's
        patch.setattr("torch.nn.attention.varlen.varlen_attn", documented_varlen_attn)
        check_kernel(varlen.VarlenKernel(), data, softcaps=(None,), may_sink=False)


def documented_varlen_attn(
    query: Tensor,  # [T, Hq, D]
    key: Tensor,  # [pages, page, Hkv, D]
    value: Tensor,
    cu_seq_q: Tensor,  # [N + 1]
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,  # [N]
    block_table: Tensor,  # [N, longest]
    num_splits: int,
) -> Tensor:
    """Causal attention of the last tokens of each sequence over its pages, aligned at the end."""
    assert query.is_contiguous() and enable_gqa and num_splits == 1 and cu_seq_k is None
    assert all(each.dtype is torch.int32 for each in (cu_seq_q, seqused_k, block_table))
    assert max_k == int(seqused_k.max()) and max_q == int(cu_seq_q.diff().max())
    left, right = window_size
    assert right == 0
    outputs = []
    for number, (begin, end) in enumerate(pairwise(cu_seq_q.tolist())):
        used = int(seqused_k[number])
        pages = block_table[number].long()
        keys, values = (pool[pages].flatten(0, 1)[:used].transpose(0, 1) for pool in (key, value))  # [Hkv, used, D]
        own = torch.arange(used - (end - begin), used)[:, None]
        other = torch.arange(used)[None, :]
        seen = (other <= own) & ((own - other <= left) if left >= 0 else torch.ones_like(other, dtype=torch.bool))
        rows = query[begin:end].transpose(0, 1)  # [Hq, rows, D]
        out = scaled_dot_product_attention(rows, keys, values, seen, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def check_kernel(kernel: AttentionKernel, data: st.DataObject, **limits: Any) -> None:
    """`kernel` against the reference, over steps of several sequences that grow, fork and shrink."""
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
    """Perhaps fork a sequence, perhaps take tokens of one back."""
    number = data.draw(st.integers(0, len(pool.mirrors) - 1))
    what = data.draw(st.sampled_from(["nothing", "fork", "truncate"]))
    if what == "fork" and len(pool.mirrors) < 5:
        pool.fork(number)
    elif what == "truncate" and pool.computed[number]:
        pool.truncate(number, data.draw(st.integers(0, pool.computed[number] - 1)))


@given(data=st.data())
def test_result_does_not_depend_on_neighbors(data: st.DataObject) -> None:
    """Bit for bit: the same row, alone and among others."""
    pool = data.draw(pools())
    pool.mirrors, pool.computed = [CachedRequestState(), CachedRequestState(), CachedRequestState()], [0, 0, 0]
    pool.compute([pool.grow(number, length) for number, length in enumerate((5, 9, 3))])
    step, query = pool.compute([pool.grow(0, 1), pool.grow(1, 4), pool.grow(2, 1)])
    options = data.draw(layer_options(pool.shape.num_heads))
    together = attend(CpuKernel(), pool, step, query, options)
    alone = pack_step([PlanRow(1, 9, 4)], [pool.mirrors[1]], pool.block_size, CPU)
    assert torch.equal(attend(CpuKernel(), pool, alone, query[1:5].contiguous(), options), together[1:5])


def test_reference_is_plain_softmax() -> None:
    """The oracle itself, against numbers worked out by hand."""
    pool = Pool(LayerGeometry(1, 1, 2, 1), 2, [3, 1])
    pool.mirrors, pool.computed = [CachedRequestState()], [0]
    step, _ = pool.compute([pool.grow(0, 2)])
    pool.layer.write(step.slots, torch.eye(2)[:, None], torch.tensor([[[10.0]], [[20.0]]]))
    query = torch.tensor([[[5.0, 5.0]], [[0.0, 2.0]]])
    out = attend(ReferenceKernel(), pool, step, query, AttentionOptions(0.5))
    expected = (10 + 20 * torch.e) / (1 + torch.e)
    torch.testing.assert_close(out.flatten(), torch.tensor([10.0, expected]))
    sinks = AttentionOptions(0.5, sinks=torch.tensor([0.0]))
    out = attend(ReferenceKernel(), pool, step, query, sinks)
    assert out.flatten()[1].item() == pytest.approx((10 + 20 * torch.e) / (2 + torch.e))
    window = AttentionOptions(0.5, window=1)
    assert attend(ReferenceKernel(), pool, step, query, window).flatten().tolist() == [10.0, 20.0]


@given(st.integers(0, 6), st.integers(1, 6), st.none() | st.integers(1, 8))
def test_chunk_mask_is_none_only_if_causal_order_is_enough(start: int, length: int, window: int | None) -> None:
    context = start + length
    first = max(0, start - window + 1) if window else 0
    mask = chunk_mask(first, start, context, window, torch.zeros(1))
    own = torch.arange(start, context)[:, None]
    other = torch.arange(first, context)[None, :]
    seen = (other <= own) & (own - other < (window or 100))
    if mask is None:
        assert first == start
        assert torch.equal(seen, torch.ones(length, length, dtype=torch.bool).tril())
    else:
        assert torch.equal(mask == 0, seen)


# -- mirrors -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_spans_are_the_block_table(blocks: list[int], size: int, data: st.DataObject) -> None:
    mirror = CachedRequestState()
    cut = data.draw(st.integers(0, len(blocks)))
    mirror.add_blocks(blocks)
    mirror.keep_blocks(cut)
    mirror.add_blocks(blocks[cut:])
    end = data.draw(st.integers(1, len(blocks) * size))
    start = data.draw(st.integers(0, end - 1))
    slots = [slot for first, count in mirror.spans(start, end, size) for slot in range(first, first + count)]
    assert slots == [blocks[p // size] * size + p % size for p in range(start, end)]
    assert mirror.num_runs == 1 + sum(b != a + 1 for a, b in pairwise(blocks))
