"""Whole steps and attention in the kernels, against torch and against themselves in other company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.config import ModelConfig
from bridle.errors import InternalError
from bridle.model import load_executor
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import LayerGeometry
from bridle.model.kernels.reference import ReferenceKernel
from bridle.model.kv_cache import LayerCache
from bridle.model.mirror import Mirror
from bridle.model.packing import PackedRow, PackedStep
from bridle.native.layers import Rows, attend
from bridle.native.library import kernels
from lab.doubles import tiny
from tests.model.driver import NaiveDriver, argmax_sampler

FOUND = kernels()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no kernels for this machine")
BLOCK = 4


def make_step(lengths: list[tuple[int, int]], seed: int) -> tuple[PackedStep, int]:
    """Sequences of (tokens in this step, tokens before), in scattered blocks; and the number of slots."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(length + before) // BLOCK) for length, before in lengths]
    free = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    rows, offset = [], 0
    for (length, before), count in zip(lengths, needed, strict=True):
        mirror = Mirror()
        mirror.tokens = [1] * (length + before)
        mirror.add_blocks(free.pop() for _ in range(count))
        rows.append(PackedRow(offset, length, length + before, mirror.spans(0, length + before, BLOCK), mirror))
        offset += length
    none = torch.zeros(1, offset, dtype=torch.int64)
    return PackedStep(none, none, none[0], none[0], rows, BLOCK), (sum(needed) + 3) * BLOCK


def make_rows(step: PackedStep, num_slots: int, num_heads: int, kv_heads: int) -> Rows:
    assert FOUND is not None
    sequences = [(row.offset, row.length, row.context, row.spans) for row in step.rows]
    return Rows(sequences, num_slots, FOUND.queries * kv_heads // num_heads)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 150)), min_size=1, max_size=5),
    group=st.sampled_from([1, 2, 7, 32]),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([16, 48, 64, 128]),
    window=st.sampled_from([None, 1, 5, 70]),
    softcap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_attention_is_that_of_the_reference(
    lengths: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    seed: int,
) -> None:
    """... whatever lies in slots that nobody wrote; and each sequence gives the same bits alone."""
    assert FOUND is not None
    torch.manual_seed(seed)
    step, num_slots = make_step(lengths, seed)
    cache = LayerCache(
        num_slots // BLOCK,
        BLOCK,
        LayerGeometry(group * kv_heads, kv_heads, dim, dim),
        torch.float32,
        torch.device("cpu"),
    )
    for pool in (cache.keys, cache.values):
        pool.fill_(float("nan"))
        for row in step.rows:
            for slot, count in row.spans:
                pool[slot : slot + count] = torch.randn(count, kv_heads, dim)
    num_tokens = sum(length for length, _ in lengths)
    query = torch.randn(num_tokens, group * kv_heads, dim)
    sinks = torch.randn(group * kv_heads) if has_sinks else None
    options = AttentionOptions(dim**-0.5, window, softcap, sinks)
    oracle = ReferenceKernel()
    oracle.begin(step)
    pair = (cache.keys, cache.values)
    rows = make_rows(step, num_slots, group * kv_heads, kv_heads)
    have = attend(FOUND, query, pair, rows, dim**-0.5, window, softcap, sinks)
    torch.testing.assert_close(have, oracle.attend(query, cache, options), atol=2e-5, rtol=2e-5)
    for row in step.rows:
        alone = Rows([(0, row.length, row.context, row.spans)], num_slots, FOUND.queries // group)
        part = query[row.offset : row.offset + row.length]
        mine = attend(FOUND, part, pair, alone, dim**-0.5, window, softcap, sinks)
        assert torch.equal(mine, have[row.offset : row.offset + row.length])
        last = Rows([(0, 1, row.context, row.spans)], num_slots, FOUND.queries // group)
        only = attend(FOUND, part[-1:], pair, last, dim**-0.5, window, softcap, sinks)
        assert torch.equal(only, mine[-1:]), "a token in a chunk is the same as by itself"


def test_hostile_rows_do_not_reach_the_kernels() -> None:
    for sequences in (
        [(0, 2, 1, [(0, 1)])],  # more tokens than context
        [(1, 1, 1, [(0, 1)])],  # a token left out
        [(0, 1, 4, [(0, 3)])],  # a position without a slot
        [(0, 1, 4, [(30, 4)])],  # beyond the cache
        [(0, 1, 4, [(-1, 4)])],
        [(0, 1, 1 << 31, [(0, 1 << 31)])],
    ):
        with pytest.raises(InternalError, match="not for a kernel"):
            Rows(sequences, 32, 4)
    assert FOUND is not None
    rows = Rows([(0, 1, 4, [(0, 4)])], 32, 4)
    cache = torch.zeros(32, 2, 64)
    for query, pool in (
        (torch.zeros(2, 4, 64), cache),  # more tokens than rows
        (torch.zeros(1, 3, 64), cache),  # heads that do not share evenly
        (torch.zeros(1, 4, 63), cache[..., :63].contiguous()),
        (torch.zeros(1, 4, 64), cache.double()),
        (torch.zeros(1, 4, 512), torch.zeros(32, 2, 512)),
    ):
        with pytest.raises(InternalError, match="not for a kernel"):
            attend(FOUND, query, (pool, pool), rows, 1.0)


def load(family: str, is_native: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    if not is_native:
        monkeypatch.setattr("bridle.model.dense_model.try_native_step", lambda layers: None)
    path = tiny.cached_checkpoint(family, head_dim=16, **settings)
    executor = load_executor(ModelConfig(model=str(path), quantization="int8"), sampler=argmax_sampler)
    assert (executor._runner._short.native is not None) == is_native
    return executor


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_families_generate_what_the_layers_in_torch_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[(7 * i + j) % 240 + 12 for i in range(5 + 9 * j)] for j in range(3)]
    plain = load(family, False, monkeypatch)
    want = NaiveDriver(plain, prompts).generate(12)
    monkeypatch.undo()
    native = load(family, True, monkeypatch)
    together = NaiveDriver(native, prompts).generate(12)
    alone = []
    for prompt in prompts:
        native.reset()
        alone += NaiveDriver(native, [prompt]).generate(12)
    assert together == alone
    same = sum(a == b for one, other in zip(together, want, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 30, "of 36: roundings that fall the other way may turn a token over"
