"""Tests of attention kernels, compared with the reference over random plans: chunks, decodes, forks, truncations and
scattered blocks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.model.batch_inputs import pack_step
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import LayerGeometry
from bridle.model.kernels import varlen
from bridle.model.kernels.cpu import CpuKernel, chunk_mask
from bridle.model.kernels.reference import ReferenceKernel
from bridle.model.sequence_state import CachedRequestState
from tests.model.attention_pool import CPU, Pool, attend, check_kernel, layer_options, pools


@given(data=st.data())
def test_cpu_kernel_equals_reference(data: st.DataObject) -> None:
    check_kernel(CpuKernel(), data)


@given(data=st.data())
def test_flash_kernel_calls_as_documented(data: st.DataObject) -> None:
    """Without a device, torch's `varlen_attn` is replaced by the computation that its documentation states."""
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
    """Compute causal attention of the last tokens of each sequence over its pages, as torch's documentation states."""
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


@given(data=st.data())
def test_result_does_not_depend_on_neighbors(data: st.DataObject) -> None:
    """A row's attention has the same bits alone and among other rows."""
    pool = data.draw(pools())
    pool.mirrors, pool.computed = [CachedRequestState(), CachedRequestState(), CachedRequestState()], [0, 0, 0]
    pool.compute([pool.grow(number, length) for number, length in enumerate((5, 9, 3))])
    step, query = pool.compute([pool.grow(0, 1), pool.grow(1, 4), pool.grow(2, 1)])
    options = data.draw(layer_options(pool.shape.num_heads))
    together = attend(CpuKernel(), pool, step, query, options)
    alone = pack_step([PlanRow(1, 9, 4)], [pool.mirrors[1]], pool.block_size, CPU)
    assert torch.equal(attend(CpuKernel(), pool, alone, query[1:5].contiguous(), options), together[1:5])


def test_reference_is_plain_softmax() -> None:
    """The reference kernel gives numbers that were computed by hand."""
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
