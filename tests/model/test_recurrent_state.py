"""Tests that families with recurrent layers equal transformers' own passes, and that each state depends only on its
tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from bridle import LLM
from bridle.config import ModelConfig
from bridle.engine.scheduling.step_plan import PlanRow, StateCopy, StateSave, StepPlan
from bridle.errors import InternalError, InvalidRequest
from bridle.model.check import check_model
from bridle.model.executor import LocalExecutor
from bridle.model.loading import load_executor
from bridle.model.lora_layers import LINEARS, Sites
from bridle.model.state_pool import StatePool, StateShape
from bridle.sampling import SamplingParams
from tests.covering import slow_but
from tests.fakes import tiny_checkpoints
from tests.model.oracle import Oracle, check_run, run

#: One of short convolutions, one of a gated delta net with a state in matrices; the others are slow.
QUICK = ("lfm2", "qwen3_5_text")
FAMILIES = slow_but(QUICK, tiny_checkpoints.HYBRID_FAMILIES)
#: The library computes prompts by another formula, so errors are larger than elsewhere.
GAP = 1e-2
PROMPT = [(7 * number) % 290 + 3 for number in range(40)]
BLOCK = 4

_executors: dict[str, LocalExecutor] = {}


def executor_of(family: str) -> LocalExecutor:
    """Return an executor from which all sequences were removed."""
    if family not in _executors:
        path = tiny_checkpoints.cached_checkpoint(family)
        loaded = load_executor(ModelConfig(str(path), dtype="float32", num_blocks=64, block_size=BLOCK))
        assert isinstance(loaded, LocalExecutor)
        _executors[family] = loaded
    _executors[family].reset()
    return _executors[family]


def row(seq_id: int, start: int, end: int, state: int, **fields: object) -> PlanRow:
    """Return a row that computes part of the prompt, in blocks that belong to its sequence."""
    first, last = -(-start // BLOCK), -(-end // BLOCK)
    blocks = tuple(range(12 * seq_id + first, 12 * seq_id + last))
    tokens = tuple(PROMPT[start:end])
    return PlanRow(seq_id, start, end - start, 1, start, tokens, first, blocks, state=state, **fields)  # type: ignore[arg-type]


def states_in(executor: LocalExecutor, slot: int) -> list[Tensor]:
    pool = executor.runner.attention.states
    assert pool is not None
    return [part[slot].clone() for layer in pool.layers.values() for part in layer.values()]


def are_close(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_passes_equal_the_library(family: str) -> None:
    report = check_model(tiny_checkpoints.cached_checkpoint(family))
    assert report.is_equal, str(report)
    assert report.num_same_greedy == report.num_positions


@pytest.mark.parametrize("family", FAMILIES)
def test_every_drawn_token_is_the_oracles(family: str) -> None:
    """The run has forks, rewinds, chunks, preemption and prefix hits, over pools that are too small."""
    path = tiny_checkpoints.cached_checkpoint(family)
    check_run(Oracle(path, GAP), *run(path, random.Random(3), 300))


@contextmanager
def row_by_row(executor: LocalExecutor) -> Iterator[None]:
    """Inside the block, linear layers compute each token alone, since their last digits depend on the number of
    tokens."""
    layers = [layer for layer in executor.runner.model.modules() if isinstance(layer, LINEARS)]
    for layer in layers:
        vars(layer)["forward"] = partial(_each_alone, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _each_alone(compute: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return torch.cat([compute(part) for part in rows.split(1, -2)], -2)


@pytest.mark.few(3)
@pytest.mark.parametrize("family", [*QUICK, "jamba", "falcon_h1", "minimax", "zamba"])
@settings(max_examples=2)
@given(seed=st.integers(0, 1 << 32))
def test_any_cutting_of_a_prompt_gives_the_same_state(family: str, seed: int) -> None:
    """Rows of any length run beside rows of other sequences. Unused states hold NaN, and states are copied between
    steps. Only the first layer's states must be equal to the last bit, as all later layers follow attention."""
    executor = executor_of(family)
    with row_by_row(executor):
        # Zamba's mixers multiply by matrices that are no layers, so last digits depend on how many tokens there are.
        check_cuttings(executor, random.Random(seed), is_exact=family != "zamba")


def check_cuttings(executor: LocalExecutor, rng: random.Random, is_exact: bool) -> None:
    first = len(next(iter(executor.runner.attention.states.layers.values())))  # type: ignore[union-attr]
    executor.forward(StepPlan(1, [row(0, 0, 40, 0)]))
    whole = states_in(executor, 0)
    pool = executor.runner.attention.states
    assert pool is not None
    for layer in pool.layers.values():
        for part in layer.values():
            part[1:].fill_(float("nan"))
    step, done, saved = 1, 0, rng.randint(1, 39)
    while done < 40:
        step, end = step + 1, min(done + rng.choice([1, 2, 5, 17]), 40)
        saves = (StateSave(saved, 3),) if done < saved <= end else ()
        rows = [row(1, done, end, 1, saves=saves), row(step + 1, 0, rng.randint(1, 9), 2)]
        for each in rows[1:]:
            each.new_blocks = tuple(range(48, 48 + len(each.new_blocks)))
        executor.forward(StepPlan(step, rng.sample(rows, 2), freed=[step]))
        done = end
    executor.forward(StepPlan(step + 1, [row(0, 0, saved, 4)], freed=[0]))
    for have, want in ((states_in(executor, 1), whole), (states_in(executor, 3), states_in(executor, 4))):
        assert not is_exact or all(map(torch.equal, have[:first], want[:first]))
        assert are_close(have, want)


def test_a_state_that_is_not_a_number_harms_no_other() -> None:
    executor = executor_of("qwen3_5_text")
    executor.forward(StepPlan(1, [row(0, 0, 20, 0), row(1, 0, 20, 1)]))
    clean = executor.logits
    assert clean is not None
    pool = executor.runner.attention.states
    assert pool is not None
    pool.copy([(0, 2)])
    executor.forward(StepPlan(2, [row(0, 20, 21, 0), row(1, 20, 21, 1)]))
    want = executor.logits
    assert want is not None
    for layer in pool.layers.values():
        for part in layer.values():
            part[1].fill_(float("nan"))
    again = [row(0, 20, 21, 0), row(1, 20, 21, 1)]
    for each in again:
        each.num_kept_blocks, each.new_blocks = 6, ()
    executor.forward(StepPlan(3, again, state_copies=[StateCopy(2, 0)]))
    have = executor.logits
    assert have is not None
    assert torch.equal(have[0], want[0])
    assert have[1].isnan().all()
    executor.forward(StepPlan(4, [row(1, 0, 20, 1)], freed=[1]))
    assert executor.logits is not None
    assert torch.allclose(executor.logits[0], clean[1], atol=1e-4)


def test_layers_within_a_scan_compute_their_products_themselves() -> None:
    """Layers within a recurrence compute their own products, so adapters can change the products whatever the form of
    the weights."""
    executor = executor_of("jamba")
    model = executor.runner.model
    inner = {name: module for name, module in model.named_modules() if name.endswith(("x_proj", "dt_proj"))}
    assert inner.keys() <= Sites(model).layers.keys()
    executor.forward(StepPlan(1, [row(0, 0, 4, 0)]))
    before = executor.logits
    assert inner and before is not None
    for module in inner.values():
        compute = module.forward
        vars(module)["forward"] = lambda rows, compute=compute: compute(rows) + 1.0
        executor.forward(StepPlan(executor._step + 1, [row(0, 0, 4, 0)], freed=[0]))  # type: ignore[operator]
        del vars(module)["forward"]
        assert executor.logits is not None
        assert not torch.allclose(executor.logits, before, atol=1e-3)


def test_a_plan_with_a_slot_that_is_not_there_changes_nothing() -> None:
    executor = executor_of("lfm2")
    for wrong in (row(0, 0, 4, -1), row(0, 0, 4, 999), row(0, 0, 4, 0, saves=(StateSave(2, 999),))):
        with pytest.raises(InternalError, match="has state slots"):
            executor.forward(StepPlan(1, [wrong]))
    executor.forward(StepPlan(1, [row(0, 0, 4, 0)]))


def test_copies_of_a_plan_are_read_before_any_is_written() -> None:
    pool = StatePool({0: {("conv", 0): StateShape((2,), torch.float32)}}, 3, torch.device("cpu"))
    part = pool.layers[0]["conv", 0]
    part.copy_(torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    pool.copy([(0, 1), (1, 2), (2, 0)])
    assert part[:, 0].tolist() == [2.0, 0.0, 1.0]


def test_memory_is_shared_by_blocks_and_states() -> None:
    path = tiny_checkpoints.cached_checkpoint("qwen3_5_text")
    executor = load_executor(ModelConfig(str(path), dtype="float32", kv_memory=1 << 20))
    info = executor.info
    kv, states = info.num_blocks * info.block_bytes, info.num_states * info.state_bytes
    assert 0.8 * (1 << 20) < kv + states <= 1 << 20
    assert info.num_states >= 16
    assert info.max_num_batched_tokens == 256
    executor.close()


@pytest.mark.usefixtures("obeyed_drafts")
def test_drafts_of_another_model_change_no_token() -> None:
    """Most draft tokens are rejected, so recurrent states return to where the draft tokens began."""
    path = str(tiny_checkpoints.cached_checkpoint("lfm2"))
    smaller = str(tiny_checkpoints.cached_checkpoint("qwen2", seed=1, num_hidden_layers=1))
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, speculate=4)
    prompts = ["a quick brown fox", "jumps over"]
    with LLM(path, device="cpu", num_blocks=64) as llm:
        plain = llm.generate(prompts, greedy.with_(speculate=0))
    with LLM(path, draft_model=smaller, device="cpu", num_blocks=64) as llm:
        drafted = llm.generate(prompts, greedy)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].usage.drafted_tokens for each in drafted) > 20


def test_a_draft_model_with_recurrent_layers_is_refused() -> None:
    target = str(tiny_checkpoints.cached_checkpoint("llama"))
    draft = str(tiny_checkpoints.cached_checkpoint("lfm2"))
    with pytest.raises(InvalidRequest, match="has recurrent layers, whose states cannot be rolled back") as caught:
        load_executor(ModelConfig(target, draft_model=draft, device="cpu", num_blocks=16))
    assert caught.value.param == "draft_model"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "text"), [("qwen3_5", "qwen3_5_text"), ("lfm2_vl", "lfm2")])
def test_the_text_of_models_that_see_is_served(family: str, text: str, tmp_path: Path) -> None:
    inner = {**tiny_checkpoints.COMMON, **tiny_checkpoints.HYBRID_FAMILIES[text], "model_type": text}
    eyes = {"hidden_size": 16, "intermediate_size": 32}
    eyes |= {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": []}
    eyes |= {"num_hidden_layers": 1, "num_attention_heads": 2} if family == "lfm2_vl" else {}
    marks = {"image_token_id": 290, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}
    config = AutoConfig.for_model(family, text_config=inner, vision_config=eyes, **marks)
    torch.manual_seed(0)  # a few parameters keep what the library draws, in part
    model = AutoModelForImageTextToText.from_config(config)
    tiny_checkpoints.randomize(model, 0)
    model.save_pretrained(tmp_path)
    tiny_checkpoints.save_tokenizer(tmp_path)
    executor = load_executor(ModelConfig(str(tmp_path), dtype="float32", num_blocks=16))
    assert executor.info.num_states > 0
    executor.close()
