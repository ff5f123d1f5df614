"""Tests of properties of the kernels of paged attention in Triton's interpreter.

`test_paged.py` runs this file in a process of its own, where TRITON_INTERPRET is set before anything imports Triton."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.lora.fused import is_interpreted
from bridle.model.batch_inputs import PackedStep, pack_step
from bridle.model.check import check_model
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels import create_kernel, paged
from bridle.model.kernels.block_table_slots import BlockTableSlots
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.reference import ReferenceKernel
from bridle.model.kernels.self_test import find_problem, tried_kernel
from bridle.model.sequence_state import CachedRequestState
from tests.fakes import tiny_checkpoints
from tests.model.addresses import check_owned, watched
from tests.model.attention_pool import CPU, Pool, attend, check_kernel, layer_options

assert is_interpreted(), "run this with TRITON_INTERPRET=1"

# What was not written is not a number, so that nobody can rely on it.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small sizes, so that short contexts are split, and a few tokens make a long chunk."""
    monkeypatch.setattr(paged, "CHUNK", 32)
    monkeypatch.setattr(paged, "MAX_SHORT", 4)


@st.composite
def large_pools(draw: st.DrawFn) -> Pool:
    """Return KV pools for sequences that are long enough to be split, with pages of any size."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 4), (1, 7), (1, 20)]))
    dim, value_dim = draw(st.sampled_from([(16, 16), (24, 24), (40, 8)]))
    block_size = draw(st.sampled_from([1, 3, 16, 32, 256]))
    free = list(range(4 + 600 // block_size))
    draw(st.randoms(use_true_random=False)).shuffle(free)
    return Pool(LayerGeometry(kv_heads * group, kv_heads, dim, value_dim), block_size, free)


def grown(pool: Pool, contexts: list[tuple[int, int]]) -> tuple[PackedStep, torch.Tensor]:
    """Return a step in which each sequence computes new tokens after a number of earlier tokens."""
    for number, (before, _) in enumerate(contexts):
        pool.mirrors.append(CachedRequestState())
        pool.computed.append(0)
        if before:
            pool.compute([pool.grow(number, before)])
    return pool.compute([pool.grow(number, length) for number, (_, length) in enumerate(contexts)])


CONTEXTS = st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 2, 4, 5, 23])), min_size=1, max_size=3)


@settings(max_examples=30)
@given(data=st.data())
def test_small_steps_give_what_the_reference_gives(data: st.DataObject) -> None:
    check_kernel(PagedKernel(CPU), data)


@settings(max_examples=30)
@given(pool=large_pools(), contexts=CONTEXTS, data=st.data())
def test_large_steps_give_what_the_reference_gives(
    pool: Pool, contexts: list[tuple[int, int]], data: st.DataObject
) -> None:
    step, query = grown(pool, contexts)
    options = data.draw(layer_options(pool.shape.num_heads))
    want = attend(ReferenceKernel(), pool, step, query, options)
    torch.testing.assert_close(attend(PagedKernel(CPU), pool, step, query, options), want, atol=2e-5, rtol=1e-4)


@settings(max_examples=15)
@given(pool=large_pools(), data=st.data())
def test_tables_that_stay_give_what_the_reference_gives(pool: Pool, data: st.DataObject) -> None:
    """One kernel runs many steps in which sequences start, grow, shrink, fork, pause and end, and exceed the slots of
    block tables."""
    kernel = PagedKernel(CPU)
    kernel.seats.num_seats, kernel.seats.width = 2, 1
    options = AttentionOptions(0.25)
    for _ in range(data.draw(st.integers(2, 6))):
        if len(pool.mirrors) < 4 and data.draw(st.booleans()):
            pool.mirrors.append(CachedRequestState())
            pool.computed.append(0)
        elif pool.mirrors:
            number = data.draw(st.integers(0, len(pool.mirrors) - 1))
            if len(pool.mirrors) < 4 and data.draw(st.booleans()):
                pool.fork(number)
            else:
                pool.truncate(number, data.draw(st.integers(0, pool.computed[number])))
        if not pool.mirrors:
            continue
        chosen = data.draw(st.sets(st.integers(0, len(pool.mirrors) - 1), min_size=1))
        step, query = pool.compute([pool.grow(number, data.draw(st.sampled_from([1, 3, 40]))) for number in chosen])
        want = attend(ReferenceKernel(), pool, step, query, options)
        torch.testing.assert_close(attend(kernel, pool, step, query, options), want, atol=2e-5, rtol=1e-4)


def dot_by_rows(self: Builder, a: Any, b: Any, d: Any, *rest: Any) -> TensorHandle:
    """Multiply as a GPU's matrix units do: each row by the same operations, wherever it is in a tile. torch on a CPU
    computes a matrix's last rows by different code."""
    product = (a.data[:, :, None] * b.data[None, :, :]).sum(1, dtype=d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


@patch.object(Builder, "create_dot", dot_by_rows)
@settings(max_examples=8)
@given(pool=large_pools(), contexts=CONTEXTS, data=st.data())
def test_a_row_is_bitwise_the_same_alone_and_among_others(
    pool: Pool, contexts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Attention has the same bits if parts of a context are computed in turns, and if a sequence is alone."""
    step, query = grown(pool, contexts)
    options = data.draw(layer_options(pool.shape.num_heads))
    together = attend(PagedKernel(CPU), pool, step, query, options)
    with patch.object(paged, "MAX_PART_BYTES", 1):
        assert torch.equal(attend(PagedKernel(CPU), pool, step, query, options), together)
    number = data.draw(st.integers(0, len(contexts) - 1))
    before, length = contexts[number]
    row = step.rows[number]
    part = query[row.offset : row.offset + length].contiguous()
    mirror = [pool.mirrors[number]]
    alone = pack_step([PlanRow(number, before, length)], mirror, pool.block_size, CPU)
    mine = attend(PagedKernel(CPU), pool, alone, part, options)
    assert torch.equal(mine, together[row.offset : row.offset + length])
    if length <= paged.MAX_SHORT:
        for place in range(length):
            single = pack_step([PlanRow(number, before + place, 1)], mirror, pool.block_size, CPU)
            out = attend(PagedKernel(CPU), pool, single, part[place : place + 1], options)
            assert torch.equal(out[0], mine[place])


@settings(max_examples=8)
@given(pool=large_pools(), contexts=CONTEXTS, data=st.data())
def test_no_program_leaves_its_tensors(pool: Pool, contexts: list[tuple[int, int]], data: st.DataObject) -> None:
    """On a GPU, an address outside of the tensors would belong to other data or crash the process."""
    step, query = grown(pool, contexts)
    options = data.draw(layer_options(pool.shape.num_heads))
    kernel = PagedKernel(CPU)
    made: list[torch.Tensor] = []

    def noting(make: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            made.append(make(*args, **kwargs))
            return made[-1]

        return noted

    news, likes = noting(torch.Tensor.new_empty), noting(torch.empty_like)
    with watched() as touched, patch.object(torch.Tensor, "new_empty", news), patch.object(torch, "empty_like", likes):
        attend(kernel, pool, step, query, options)
    assert touched
    assert kernel.packed_words is not None
    assert kernel.tables is not None
    held = [query, pool.layer.keys, pool.layer.values, kernel.packed_words, kernel.tables, *made]
    held += [] if options.sinks is None else [options.sinks]
    check_owned(touched, held)


def test_queries_may_be_a_view() -> None:
    pool = Pool(LayerGeometry(4, 2, 16, 16), 4, list(range(50)))
    step, query = grown(pool, [(40, 1), (0, 6)])
    options = AttentionOptions(0.25)
    wide = torch.full((step.num_tokens, 9, 16), float("nan"))
    wide[:, 2:6] = query
    want = attend(PagedKernel(CPU), pool, step, query, options)
    assert torch.equal(attend(PagedKernel(CPU), pool, step, wide[:, 2:6], options), want)
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(PagedKernel(CPU), pool, step, by_head, options), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_trial_lets_the_kernels_pass_and_no_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with the sizes of real steps
    shape = LayerGeometry(6, 2, 24, 24, window=100, has_softcap=True, has_sinks=True)
    geometry = Geometry({0: shape}, 2)
    assert isinstance(tried_kernel("paged", CPU, dtype, geometry, 16), PagedKernel)
    kernel = create_kernel("paged", CPU, dtype)
    honest = paged.lay_out

    def forgetful(rows: Any, size: int, seats: BlockTableSlots) -> Any:
        layout = honest(rows, size, seats)
        layout.words[-2 * layout.num_news + 1 :: 2] = 0  # everybody reads the first block
        return layout

    monkeypatch.setattr(paged, "lay_out", forgetful)
    assert "differs by" in str(find_problem(kernel, geometry, dtype, CPU, 16))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "phi"])
def test_a_model_gives_what_its_own_attention_gives(family: str) -> None:
    report = check_model(tiny_checkpoints.cached_checkpoint(family), kernel="paged", max_tokens=64)
    assert report.kernel == "paged"
    assert report.is_equal, str(report)
