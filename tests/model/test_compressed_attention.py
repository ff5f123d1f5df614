"""Tests that attention over compressed windows (DeepSeek V4) equals transformers', however the cache is used."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from bridle.config import ModelConfig
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, StepPlan
from bridle.errors import InvalidRequest
from bridle.lora import require_device
from bridle.model.check import check_model
from bridle.model.executor import LocalExecutor
from bridle.model.loading import load_executor
from tests.conftest import examples
from tests.fakes import tiny_checkpoints
from tests.model.oracle import Oracle, check_run, run

FAMILY, BLOCK = "deepseek_v4", 4
SHAPES = tiny_checkpoints.COMPRESSED_FAMILIES[FAMILY]
RATE = SHAPES["compress_rates"]["heavily_compressed_attention"]
#: Longer than the sliding window, and several times as long as a heavily compressed one.
LENGTH = 5 * RATE + 3
PROMPT = tuple((7 * number) % 290 + 3 for number in range(LENGTH))
OTHER = tuple((11 * number) % 290 + 3 for number in range(LENGTH))


def load(**fields: Any) -> LocalExecutor:
    path = tiny_checkpoints.cached_checkpoint(FAMILY)
    loaded = load_executor(ModelConfig(str(path), num_blocks=64, block_size=BLOCK, **{"dtype": "float32", **fields}))
    assert isinstance(loaded, LocalExecutor)
    return loaded


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    loaded = load()
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def library() -> Any:
    path = tiny_checkpoints.cached_checkpoint(FAMILY)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def wanted(library: Any) -> Tensor:
    return logits_of(library, PROMPT)


@torch.inference_mode()
def logits_of(library: Any, tokens: tuple[int, ...]) -> Tensor:
    """Return transformers' logits [L, V]."""
    return library(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]  # type: ignore[no-any-return]


def row(seq_id: int, start: int, end: int, tokens: tuple[int, ...] = PROMPT, first_block: int = 0) -> PlanRow:
    """Return a row that computes part of the tokens, with logits of each of its positions."""
    first, last = -(-start // BLOCK), -(-end // BLOCK)
    blocks = tuple(range(first_block + first, first_block + last))
    return PlanRow(seq_id, start, end - start, end - start, start, tokens[start:end], first, blocks)


def compute(executor: LocalExecutor, step: int, *rows: PlanRow, freed: tuple[int, ...] = ()) -> list[Tensor]:
    executor.forward(StepPlan(step, list(rows), freed=list(freed)))
    executor.sample(SampleBatch(step))
    assert isinstance(executor.logits, Tensor)
    return list(torch.split(executor.logits.clone(), [each.num_logits for each in rows]))


def is_close(have: Tensor, want: Tensor) -> bool:
    return torch.allclose(have, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_every_sampled_token_is_the_oracles(seed: int) -> None:
    """The run has forks, rewinds, chunks, preemption and prefix hits, over a cache that is too small."""
    path = tiny_checkpoints.cached_checkpoint(FAMILY)
    check_run(Oracle(path), *run(path, random.Random(seed), 300))


@settings(max_examples=examples(8), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_cutting_gives_the_librarys_logits(executor: LocalExecutor, wanted: Tensor, seed: int) -> None:
    """The prompt is computed in chunks of any length, while other sequences come and go."""
    executor.reset()
    rng, step, done = random.Random(seed), 0, 0
    while done < LENGTH:
        step, end = step + 1, min(done + rng.choice([1, 2, 3, 5, RATE, RATE + 1, 17]), LENGTH)
        rows = [row(0, done, end), row(step, 0, rng.randint(1, LENGTH), OTHER, 32)]
        at = rng.randrange(2)
        have = compute(executor, step, *(rows[::-1] if at else rows), freed=(step - 1,) if step > 1 else ())[at]
        assert is_close(have, wanted[done:end]), f"positions {done} to {end - 1}"
        done = end


@pytest.mark.parametrize("back", [1, 2, 3, 4, 5, RATE - 1, RATE, RATE + 1, 3 * RATE])
@pytest.mark.parametrize("length", [4 * RATE - 1, 4 * RATE, 4 * RATE + 1])
def test_a_rewind_leaves_nothing_behind(executor: LocalExecutor, library: Any, length: int, back: int) -> None:
    """Tokens within compressed windows are rolled back, and different tokens follow."""
    executor.reset()
    start = length - back
    compute(executor, 1, row(0, 0, length))
    tokens = (*PROMPT[:start], *OTHER[: LENGTH - start])
    first, last = -(-length // BLOCK), -(-LENGTH // BLOCK)
    again = PlanRow(0, start, LENGTH - start, LENGTH - start, start, tokens[start:], first, tuple(range(first, last)))
    assert is_close(compute(executor, 2, again)[0], logits_of(library, tokens)[start:])


def test_greedy_tokens_are_those_of_the_librarys_own_cache(executor: LocalExecutor, library: Any) -> None:
    executor.reset()
    ids = torch.tensor([PROMPT[:10]])
    answer = library.generate(ids, max_new_tokens=LENGTH - 10, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens = tuple(answer[0].tolist())
    (have,) = compute(executor, 1, row(0, 0, LENGTH, tokens))
    assert have[9:-1].argmax(-1).tolist() == list(tokens[10:])


@pytest.mark.parametrize("what", ["index_topk", "compress", "tid2eid"])
def test_the_checkpoint_tells_layers_from_others(library: Any, wanted: Tensor, what: str) -> None:
    """The model's logits depend on its index, its windows and its experts, so the tests above would notice an error in
    each of them."""
    other = deepcopy(library)
    for layer in other.model.layers:
        compressor, gate = layer.self_attn.compressor, layer.mlp.gate
        if what == "index_topk" and hasattr(compressor, "indexer"):
            compressor.indexer.index_topk = 1_000
        if what == "compress" and compressor is not None:
            compressor.kv_norm.weight.data.neg_()
        if what == "tid2eid" and layer.mlp.is_hash:
            gate.tid2eid.copy_(gate.tid2eid.roll(1, 0))
    first = {"index_topk": 4 * SHAPES["index_topk"] + 3, "compress": 3, "tid2eid": 0}[what]
    changed = logits_of(other, PROMPT)
    assert is_close(changed[:first], wanted[:first])
    assert (changed[first:] - wanted[first:]).abs().amax(-1).median() > 1.0


def test_pieces_of_a_long_row_give_the_same(
    executor: LocalExecutor, wanted: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.reset()
    monkeypatch.setattr("bridle.model.compressed_windows.MAX_SCORES", 16 * 31 * 5)
    assert is_close(compute(executor, 1, row(0, 0, LENGTH))[0], wanted)


def test_what_tokens_keep_counts_as_memory(executor: LocalExecutor) -> None:
    head, index = SHAPES["head_dim"], SHAPES["index_head_dim"]
    sparse, heavy = 4 * (head + index) + index, 2 * head
    per_token = 4 * (4 * 2 * head + 2 * sparse + heavy)
    assert executor.info.block_bytes == BLOCK * per_token
    assert executor.runner.attention.cache.num_bytes == 64 * BLOCK * per_token


def test_eight_bits_are_too_few_for_windows() -> None:
    with pytest.raises(InvalidRequest, match="keys are compressed in windows, which int8 cannot hold") as caught:
        load(kv_cache_dtype="int8")
    assert caught.value.param == "kv_cache_dtype"


def test_halves_of_numbers_do_not_depend_on_chunks() -> None:
    """With a bfloat16 cache, even a step's own keys and values are read in rounded form, so chunks change nothing."""
    rounded = load(kv_cache_dtype="bfloat16")
    (whole,) = compute(rounded, 1, row(0, 0, LENGTH))
    rounded.reset()
    parts = [compute(rounded, 1 + at, row(0, at, min(at + 7, LENGTH)))[0] for at in range(0, LENGTH, 7)]
    assert is_close(torch.cat(parts), whole)
    rounded.close()


def test_adapters_name_no_layer_that_sees_parts_of_a_step(executor: LocalExecutor) -> None:
    names = require_device(executor).layers
    assert "model.layers.1.self_attn.q_b_proj" in names
    assert not any(".compressor." in name for name in names)


def test_streams_take_no_control_vectors(executor: LocalExecutor) -> None:
    assert executor.control_vectors is None


def test_quantized_layers_compress_too(executor: LocalExecutor, wanted: Tensor) -> None:
    close = load(quantization="q8_0")
    have = compute(close, 1, row(0, 0, LENGTH))[0]
    close.close()
    assert torch.nn.functional.cosine_similarity(have, wanted).median() > 0.9
    assert check_model(tiny_checkpoints.cached_checkpoint(FAMILY), dtype="bfloat16", max_tokens=12).is_equal
