"""Tests of whole steps and of attention in the CPU kernels, compared with torch and with the same rows in other
batches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.config import ModelConfig
from bridle.cpu_kernels.layers import AttentionRows, LayerKV, attend
from bridle.cpu_kernels.library import kernels
from bridle.engine.interfaces import Executor
from bridle.engine.scheduling.step_plan import StepPlan
from bridle.errors import InternalError, InvalidRequest
from bridle.model import load_executor
from bridle.model.batch_inputs import PackedRow, PackedStep
from bridle.model.dense_layer import DENSE_FAMILIES
from bridle.model.device_defaults import choose_kv_dtype
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels.reference import ReferenceKernel
from bridle.model.kv_cache import KVCache, KVMemory, LayerCache, round_heads, token_bytes
from bridle.model.native_step import try_native_step
from bridle.model.sequence_state import CachedRequestState
from tests.conftest import examples
from tests.fakes import tiny_checkpoints
from tests.model.driver import NaiveDriver, argmax_sampler
from tests.model.oracle import Wanderer, run

FOUND = kernels()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no kernels for this machine")
BLOCK = 4


def make_step(lengths: list[tuple[int, int]], seed: int) -> tuple[PackedStep, int]:
    """Return a step of sequences in scattered blocks, and the number of slots. `lengths` has each sequence's new and
    earlier tokens."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(length + before) // BLOCK) for length, before in lengths]
    free = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    rows, offset = [], 0
    for (length, before), count in zip(lengths, needed, strict=True):
        mirror = CachedRequestState()
        mirror.tokens = [1] * (length + before)
        mirror.add_blocks(free.pop() for _ in range(count))
        rows.append(PackedRow(offset, length, length + before, mirror.spans(0, length + before, BLOCK), mirror))
        offset += length
    none = torch.zeros(1, offset, dtype=torch.int64)
    return PackedStep(none, none, none[0], none[0], rows, BLOCK), (sum(needed) + 3) * BLOCK


def make_rows(step: PackedStep, num_slots: int, num_heads: int, kv_heads: int) -> AttentionRows:
    assert FOUND is not None
    sequences = [(row.offset, row.length, row.context, row.spans) for row in step.rows]
    return AttentionRows(sequences, num_slots, FOUND.queries * kv_heads // num_heads)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 150)), min_size=1, max_size=5),
    group=st.sampled_from([1, 2, 7, 32]),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([16, 48, 64, 128]),
    window=st.sampled_from([None, 1, 5, 70]),
    softcap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
    kv=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(60, quick=8), deadline=None)
def test_attention_is_that_of_the_reference(
    lengths: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    kv: torch.dtype,
    seed: int,
) -> None:
    """Attention equals the reference's for any content of unwritten slots, and a sequence's attention has the same bits
    alone."""
    assert FOUND is not None
    torch.manual_seed(seed)
    step, num_slots = make_step(lengths, seed)
    cache = LayerCache(
        num_slots // BLOCK,
        BLOCK,
        LayerGeometry(group * kv_heads, kv_heads, dim, dim),
        kv,
        KVMemory(2 * num_slots * kv_heads * dim * kv.itemsize, torch.device("cpu")),
    )
    for pool in cache.parts:
        pool.fill_(77 if pool.dtype is torch.int8 else float("nan"))
    for row in step.rows:
        for slot, count in row.spans:
            key, value = torch.randn(2, count, kv_heads, dim) * torch.logspace(-1, 0, kv_heads)[:, None]
            cache.write(torch.arange(slot, slot + count), key, value)
    num_tokens = sum(length for length, _ in lengths)
    query = torch.randn(num_tokens, group * kv_heads, dim)
    sinks = torch.randn(group * kv_heads) if has_sinks else None
    options = AttentionOptions(dim**-0.5, window, softcap, sinks)
    oracle = ReferenceKernel()
    oracle.begin(step)
    pair = cache.pool
    rows = make_rows(step, num_slots, group * kv_heads, kv_heads)
    have = attend(FOUND, query, pair, rows, dim**-0.5, window, softcap, sinks)
    torch.testing.assert_close(have, oracle.attend(query, cache, options), atol=2e-5, rtol=2e-5)
    for row in step.rows:
        alone = AttentionRows([(0, row.length, row.context, row.spans)], num_slots, FOUND.queries // group)
        part = query[row.offset : row.offset + row.length]
        mine = attend(FOUND, part, pair, alone, dim**-0.5, window, softcap, sinks)
        assert torch.equal(mine, have[row.offset : row.offset + row.length])
        last = AttentionRows([(0, 1, row.context, row.spans)], num_slots, FOUND.queries // group)
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
        with pytest.raises(InternalError, match="a CPU kernel cannot take"):
            AttentionRows(sequences, 32, 4)
    assert FOUND is not None
    rows = AttentionRows([(0, 1, 4, [(0, 4)])], 32, 4)
    cache = torch.zeros(32, 2, 64)
    for query, pool in (
        (torch.zeros(2, 4, 64), cache),  # more tokens than rows
        (torch.zeros(1, 3, 64), cache),  # heads that do not share evenly
        (torch.zeros(1, 4, 63), cache[..., :63].contiguous()),
        (torch.zeros(1, 4, 64), cache.double()),
        (torch.zeros(1, 4, 64), cache.to(torch.int8)),  # without scales
        (torch.zeros(1, 4, 512), torch.zeros(32, 2, 512)),
    ):
        with pytest.raises(InternalError, match="a CPU kernel cannot take"):
            attend(FOUND, query, LayerKV(pool, pool), rows, 1.0)


def load(family: str, is_native: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """Load a tiny model. `kernel`, `kv_cache_dtype` and `quantization` in `settings` configure the loader, all others
    the model."""
    if not is_native:
        monkeypatch.setattr("bridle.model.dense_model.try_native_step", lambda layers: None)
        settings["kernel"] = "cpu"
    options = {name: settings.pop(name) for name in ("kernel", "kv_cache_dtype", "quantization") if name in settings}
    fitting = {"head_dim": 16, "hidden_size": 64, **settings}
    path = tiny_checkpoints.cached_checkpoint(family, **fitting)
    executor = load_executor(ModelConfig(model=str(path), num_blocks=64, **options), sampler=argmax_sampler)
    assert (executor.runner.lowered.native is not None) == is_native
    return executor


PROMPTS = [[(7 * i + j) % 240 + 12 for i in range(5 + 9 * j)] for j in range(3)]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *((family, "none") for family in sorted(DENSE_FAMILIES)),
        *((family, "int8") for family in ("qwen2", "gemma2", "olmo2")),
    ],
)
def test_families_generate_what_the_layers_in_torch_do(
    family: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(family, False, monkeypatch, quantization=quantization)
    want = NaiveDriver(plain, PROMPTS).generate(12)
    monkeypatch.undo()
    native = load(family, True, monkeypatch, quantization=quantization)
    together = NaiveDriver(native, PROMPTS).generate(12)
    alone = []
    for prompt in PROMPTS:
        native.reset()
        alone += NaiveDriver(native, [prompt]).generate(12)
    assert together == alone
    same = sum(a == b for one, other in zip(together, want, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= (36 if quantization == "none" else 30), (
        "of 36: roundings that fall the other way may turn a token over"
    )


def prefill(executor: Any, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """Return the logits [V] of the last token of a prompt that is computed in chunks."""
    executor.reset()
    driver = NaiveDriver(executor, [tokens])
    for chunk in chunks:
        driver.executor.forward(StepPlan(driver.step + 1, [driver.row(0, chunk)]))
        driver.step += 1
    assert driver.computed[0] == len(tokens)
    return executor.logits[-1].clone()


@pytest.mark.few(1)
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", ["gemma2", "qwen3", "olmo2"])
def test_types_of_keys_and_values_agree_with_torch(family: str, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write keys and values rounded as torch rounds them, and the result does not depend on how a prompt is
    divided."""
    tokens = [(11 * i) % 240 + 12 for i in range(70)]
    plain = load(family, False, monkeypatch, kv_cache_dtype=kv)
    want = prefill(plain, tokens, [70])
    monkeypatch.undo()
    native = load(family, True, monkeypatch, kv_cache_dtype=kv)
    have = prefill(native, tokens, [70])
    for chunks in ([1] * 70, [33, 1, 36], [7] * 10):
        assert torch.equal(prefill(native, tokens, chunks), have)
    wide = 1e-4 if kv == "float32" else 0.05  # a number near the middle of two may be rounded to either
    assert float((have - want).abs().max()) <= wide * float(want.abs().max())
    first = [executor.runner.attention.cache.layers[0] for executor in (native, plain)]
    assert first[0].keys.dtype is getattr(torch, kv)
    slots = torch.arange(70)
    for mine, other in zip(*(cache.gather(slots, torch.float32) for cache in first), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4 if kv == "float32" else 0.06, rtol=0.01)


@given(seed=st.integers(0, 9999), dim=st.sampled_from([16, 48, 64]), size=st.floats(-6, 6))
@settings(max_examples=examples(30, quick=5), deadline=None)
def test_heads_are_rounded_to_the_nearest(seed: int, dim: int, size: float) -> None:
    torch.manual_seed(seed)
    heads = torch.randn(3, 2, dim) * 10**size
    integers, scale = round_heads(heads)
    assert float(integers.abs().max()) == 127
    error = (integers * scale.unsqueeze(-1) - heads).abs()
    assert bool((error <= 0.5001 * scale.unsqueeze(-1)).all())
    memory = KVMemory(2 * 4 * 2 * dim, torch.device("cpu"))
    cache = LayerCache(1, 4, LayerGeometry(2, 2, dim, dim), torch.int8, memory)
    cache.write(torch.tensor([2, 0, 3]), heads, heads)
    assert torch.equal(
        cache.gather(torch.tensor([2, 0, 3]), torch.float32)[0][0].transpose(0, 1), integers * scale[..., None]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_the_engine_did_logits_are_those_of_a_fresh_pass(kv: str, seed: int) -> None:
    """After prefix hits, forks, splices, rewinds and preemption, each sampled token is the best one of a single
    pass."""
    path = tiny_checkpoints.cached_checkpoint("qwen3", head_dim=16, hidden_size=64)

    def load_it(config: ModelConfig) -> Executor:
        return load_executor(replace(config, kv_cache_dtype=kv))  # type: ignore[arg-type]

    run(path, random.Random(seed), 300, load_it)
    fresh = load_executor(ModelConfig(str(path), num_blocks=64, kv_cache_dtype=kv), sampler=argmax_sampler)  # type: ignore[arg-type]
    assert fresh.runner is not None and fresh.runner.lowered is not None and fresh.runner.lowered.native is not None
    for before, token, allowed in Wanderer.draws[:40]:
        logits = prefill(fresh, list(before), [len(before)])
        ids = torch.tensor(sorted(allowed) if allowed is not None else range(300))
        assert token == int(ids[logits[ids].argmax()])


@pytest.mark.parametrize(("family", "rope"), [("llama", "default"), ("gemma3_text", "default"), ("llama", "yarn")])
def test_angles_that_are_kept_are_those_that_are_computed(
    family: str, rope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}
    monkeypatch.setattr("bridle.model.native_step.POSITIONS", 7)  # in several pieces
    executor = load(family, True, monkeypatch, **(scaled if rope == "yarn" else {}))
    native = executor.runner.lowered.native
    assert native.angles is not None
    kept = prefill(executor, PROMPTS[2], [9, 1, len(PROMPTS[2]) - 10])
    native.angles = None
    executor.reset()
    assert torch.equal(prefill(executor, PROMPTS[2], [9, 1, len(PROMPTS[2]) - 10]), kept)


def test_angles_are_computed_once_and_only_as_far_as_requests_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.model.native_step.POSITIONS", 7)
    executor, asked = load("llama", True, monkeypatch), []
    lowered, prompt = executor.runner.lowered, PROMPTS[2][:10]
    rotations = lowered.rotations

    def compute(position_ids: Any) -> Any:
        asked.extend(position_ids.flatten().tolist())
        return rotations(position_ids)

    lowered.rotations = compute
    lowered.keep_angles(40)
    assert max(asked) == 6
    first = prefill(executor, prompt, [len(prompt)])
    assert max(asked) == 13
    asked.clear()
    executor.reset()
    assert torch.equal(prefill(executor, prompt, [len(prompt)]), first) and not asked


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_trial_leaves_layers_out_and_nothing_behind(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, prompt = load(family, True, monkeypatch), PROMPTS[1]
    want = prefill(executor, prompt, [len(prompt)])
    executor.reset()
    with executor.trying(4), executor.runner.first_layers() as layers:
        assert 0 < len(layers) < len(executor.runner.lowered.layers)
        assert {executor.runner.lowered.layers[n].options.window for n in layers} == {
            layer.options.window for layer in executor.runner.lowered.layers
        }
        assert not torch.equal(prefill(executor, prompt, [len(prompt)]), want)
    executor.reset()
    assert torch.equal(prefill(executor, prompt, [len(prompt)]), want)


def test_angles_are_computed_where_a_table_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.model.rope.MAX_TABLE_BYTES", 1000)
    executor = load("llama", True, monkeypatch)
    assert executor.runner.lowered.native.angles is None
    assert prefill(executor, PROMPTS[1], [len(PROMPTS[1])]).isfinite().all()


def test_large_gates_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate below -88, whose exponential overflows float32, gives 0 as in torch."""
    path = tiny_checkpoints.cached_checkpoint("llama", seed=3, head_dim=16, hidden_size=64)
    results = []
    for name in ("native", "cpu"):
        executor = load_executor(ModelConfig(str(path), num_blocks=64, kernel=name), sampler=argmax_sampler)
        for layer in executor.runner.lowered.layers:  # type: ignore[union-attr]
            layer.mlp_norm.weight.mul_(300)
        if name == "native":
            executor.runner.lowered.native = try_native_step(executor.runner.lowered.layers)  # type: ignore[union-attr]
        results.append(prefill(executor, PROMPTS[2], [len(PROMPTS[2])]))
    torch.testing.assert_close(results[0], results[1], atol=1e-2, rtol=1e-3)


def test_types_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="kv_cache_dtype is 'int8'; on cuda"):
        choose_kv_dtype(ModelConfig(kv_cache_dtype="int8"), torch.float16, torch.device("cuda"))
    assert choose_kv_dtype(ModelConfig(), torch.bfloat16, torch.device("cpu")) is torch.bfloat16
    shape = LayerGeometry(8, 2, 64, 64)
    assert token_bytes(Geometry({0: shape, 1: shape}, 10), torch.float32) == 2 * 2 * 128 * 4
    assert token_bytes(Geometry({0: shape, 1: shape}, 10), torch.int8) == 2 * 2 * (128 + 8)
    cache = KVCache(Geometry({0: shape, 1: shape}, 10), 5, 4, torch.int8, torch.device("cpu"))
    assert cache.num_bytes == 20 * token_bytes(Geometry({0: shape, 1: shape}, 10), torch.int8)


def test_torch_computes_with_one_thread_while_native_layers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads of torch would occupy the processors that the kernels need."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        executor, seen = load("llama", True, monkeypatch), list[int]()
        native = executor.runner.lowered.native
        advance = native.advance
        monkeypatch.setattr(
            native, "advance", lambda *given: [seen.append(torch.get_num_threads()), advance(*given)][1]
        )
        prefill(executor, PROMPTS[0], [len(PROMPTS[0])])
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
