"""Tests of the executor alone: greedy output equals transformers', plans are checked, and failures are contained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bridle.config import EngineConfig, ModelConfig
from bridle.engine import Engine, Request
from bridle.engine.scheduling.step_plan import BlockCopy, ForkRow, PlanRow, SampleBatch, SampleRow, ScoreRun, StepPlan
from bridle.errors import BridleError, InternalError, InvalidRequest, ShardUnavailable
from bridle.model.executor import LocalExecutor
from bridle.model.loading import load_executor
from bridle.outputs import Finished, TokenEvent
from bridle.sampling import SamplingParams
from tests.fakes import tiny_checkpoints
from tests.model.driver import GREEDY, NaiveDriver, argmax_sampler, load

PROMPTS = [[5, 6, 7, 8, 9] * 6, [10, 11, 12], [40] * 17]


def library_output(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation by transformers' own `generate`."""
    # By default some versions give Gemma 2 an attention that forgets to cap scores.
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(path, **settings).eval()
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": num_tokens}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture
def executor() -> LocalExecutor:
    return load(tiny_checkpoints.cached_checkpoint("llama"))


@pytest.mark.few(4)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gpt2", "gpt_oss", "mixtral", "phi"])
def test_greedy_equals_generate(family: str) -> None:
    path = tiny_checkpoints.cached_checkpoint(family)
    want = [library_output(path, prompt, 24) for prompt in PROMPTS]
    assert NaiveDriver(load(path), PROMPTS).generate(24) == want


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "gpt_oss"])
def test_a_model_that_is_loaded_beside_it_disturbs_nothing(family: str) -> None:
    """A step is right while another model loads, which changes torch's default dtype of the whole process for a
    moment."""
    executor = load(tiny_checkpoints.cached_checkpoint(family))
    want = NaiveDriver(executor, PROMPTS).generate(4)
    executor.reset()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert NaiveDriver(executor, PROMPTS).generate(4) == want
    finally:
        torch.set_default_dtype(torch.float32)


def test_chunked_prefill_beside_decodes(executor: LocalExecutor) -> None:
    want = NaiveDriver(executor, PROMPTS).generate(8)
    executor.reset()
    driver = NaiveDriver(executor, PROMPTS)
    driver.run_step({1: None})
    for _ in range(7):
        driver.run_step({0: 5, 1: None, 2: 3})
    while any(len(driver.tokens[n]) - driver.num_prompt[n] < 8 for n in driver.tokens):
        driver.run_step({n: None for n in driver.tokens if len(driver.tokens[n]) - driver.num_prompt[n] < 8})
    assert [driver.tokens[n][driver.num_prompt[n] :] for n in driver.tokens] == want


def test_backtrack_and_fork(executor: LocalExecutor) -> None:
    """A fork with a copied tail block and a truncated sequence both continue as if computed from scratch."""
    driver = NaiveDriver(executor, [PROMPTS[0]])
    driver.generate(6)
    tokens = driver.tokens[0][:36]  # all but the last were computed: 35 positions, 9 blocks of 4
    assert driver.blocks[0] == list(range(9))
    child_tokens = (*tokens[:30], 99)
    plan = StepPlan(
        100,
        rows=[
            # the parent goes back to 33 tokens and gets two others
            PlanRow(0, 33, 2, num_kept=33, new_tokens=(77, 78), num_kept_blocks=9, num_prompt=30),
            PlanRow(7, 30, 1, num_kept=30, new_tokens=(99,), num_kept_blocks=7, new_blocks=(20,), num_prompt=30),
        ],
        forks=[ForkRow(0, 7, 30, 8)],
        copies=[BlockCopy(7, 20)],
    )
    executor.forward(plan)
    batch = SampleBatch(100, [SampleRow(0, 0, GREEDY), SampleRow(7, 1, GREEDY)])
    got = executor.sample(batch).tokens
    executor.reset()
    fresh = NaiveDriver(executor, [[*tokens[:33], 77, 78], child_tokens])
    assert got == [fresh.generate(1)[n][0] for n in (0, 1)]


def test_history_is_the_mirror(executor: LocalExecutor) -> None:
    seen: dict[int, tuple[list[int], int]] = {}

    def spy(logits: Any, batch: SampleBatch, history: Any) -> Any:
        for row in batch.rows:
            tokens, num_prompt = history(row)
            seen[row.seq_id] = (list(tokens), num_prompt)
        return argmax_sampler(logits, batch, history)

    executor.sampler = spy
    driver = NaiveDriver(executor, PROMPTS[:2])
    driver.generate(3)
    assert seen == {n: (driver.tokens[n][:-1], driver.num_prompt[n]) for n in (0, 1)}


def test_several_logits_per_row_and_scores(executor: LocalExecutor) -> None:
    shapes = []

    def spy(logits: Any, batch: SampleBatch, history: Any) -> Any:
        shapes.append((tuple(logits.shape), batch.scores[0].tokens))
        return argmax_sampler(logits, batch, history)

    executor.sampler = spy
    executor.forward(StepPlan(1, [PlanRow(0, 0, 5, num_logits=4, new_tokens=(3, 4, 5, 6, 7), new_blocks=(0, 1))]))
    executor.sample(SampleBatch(1, [], [ScoreRun(0, 0, (4, 5, 6, 7))]))
    assert shapes == [((4, 300), (4, 5, 6, 7))]
    with pytest.raises(InternalError, match="of 4 rows in step 1"):
        executor.sample(SampleBatch(1, [], [ScoreRun(0, 1, (4, 5, 6, 7))]))


# -- plans that are off ------------------------------------------------------------------------------------

GOOD = PlanRow(0, 0, 5, new_tokens=(3, 4, 5, 6, 7), new_blocks=(0, 1))
BAD: list[tuple[StepPlan, str]] = [
    (StepPlan(1, [GOOD]), "stale"),
    (StepPlan(2, [PlanRow(0, 5, 1, num_kept=6, new_tokens=(1,))]), r"keeps \(6, 0\)"),
    (StepPlan(2, [PlanRow(0, 5, 1, num_kept=5, num_kept_blocks=3, new_tokens=(1,))]), r"keeps \(5, 3\)"),
    (StepPlan(2, [PlanRow(0, 5, 2, num_kept=5, num_kept_blocks=2, new_tokens=(1,))]), "up to position 7"),
    (StepPlan(2, [PlanRow(0, 5, 0, num_kept=5, num_kept_blocks=2)]), "schedules 0 tokens"),
    (StepPlan(2, [PlanRow(0, 4, 1, num_logits=2, num_kept=5, num_kept_blocks=2)]), "2 logits"),
    (
        StepPlan(2, [PlanRow(0, 5, 4, num_kept=5, num_kept_blocks=2, new_tokens=(1, 1, 1, 1))]),
        "has blocks for 8 tokens",
    ),
    (StepPlan(2, [PlanRow(1, 0, 1, new_tokens=(1,), new_blocks=(128,))]), "block 128; the pool has 128"),
    (StepPlan(2, [PlanRow(1, 0, 1, new_tokens=(300,), new_blocks=(9,))]), "token id 300"),
    (StepPlan(2, [PlanRow(1, 0, 1, new_tokens=(-1,), new_blocks=(9,))]), "token id -1"),
    (StepPlan(2, [PlanRow(1, 2, 1, num_kept=2, new_tokens=(1,), new_blocks=(9,))]), r"but has \(0, 0\)"),
    (StepPlan(2, [GOOD, GOOD]), "two rows"),
    (StepPlan(2, forks=[ForkRow(5, 6, 0, 0)]), "parent 5, which the executor does not know"),
    (StepPlan(2, forks=[ForkRow(0, 0, 1, 1)]), "has the id of a known sequence"),
    (StepPlan(2, forks=[ForkRow(0, 6, 6, 1)]), r"copies \(6, 1\)"),
    (StepPlan(2, copies=[BlockCopy(0, 128)]), "is outside of 128 blocks"),
    (StepPlan(2, [PlanRow(0, 5, 1, num_kept=5, num_kept_blocks=2, new_tokens=(1,))], freed=[0]), "but has"),
]


@pytest.mark.parametrize(("plan", "message"), BAD, ids=[message for _, message in BAD])
def test_inconsistent_plans_change_nothing(executor: LocalExecutor, plan: StepPlan, message: str) -> None:
    executor.forward(StepPlan(1, [GOOD]))
    with pytest.raises(InternalError, match=message):
        executor.forward(plan)
    assert executor.history(SampleRow(0, 0, GREEDY)) == ([3, 4, 5, 6, 7], 0)
    executor.forward(StepPlan(3, [PlanRow(0, 5, 1, num_kept=5, num_kept_blocks=2, new_tokens=(8,))]))
    assert executor.history(SampleRow(0, 0, GREEDY))[0] == [3, 4, 5, 6, 7, 8]


def test_batches_that_are_off(executor: LocalExecutor) -> None:
    with pytest.raises(InternalError, match="last forward pass was step None"):
        executor.sample(SampleBatch(1, [SampleRow(0, 0, GREEDY)]))
    executor.forward(StepPlan(1, [GOOD]))
    with pytest.raises(InternalError, match="step 2"):
        executor.sample(SampleBatch(2, [SampleRow(0, 0, GREEDY)]))
    with pytest.raises(InternalError, match="row 1 of 1"):
        executor.sample(SampleBatch(1, [SampleRow(0, 1, GREEDY)]))
    assert executor.sample(SampleBatch(1)).tokens == []


def test_steps_without_rows_or_logits(executor: LocalExecutor) -> None:
    executor.forward(StepPlan(1, [PlanRow(0, 0, 3, num_logits=0, new_tokens=(3, 4, 5), new_blocks=(0,))]))
    assert executor.sample(SampleBatch(1)).tokens == []
    executor.forward(StepPlan(2, freed=[0]))
    with pytest.raises(InternalError, match="of 0 rows in step 2"):
        executor.sample(SampleBatch(2, [SampleRow(0, 0, GREEDY)]))
    with pytest.raises(InternalError, match="has no state of sequence 0"):
        executor.history(SampleRow(0, 0, GREEDY))


def test_adapters_that_are_not_there_are_refused(executor: LocalExecutor) -> None:
    with pytest.raises(InternalError, match="'style', which is not on the device"):
        executor.forward(StepPlan(1, [PlanRow(0, 0, 1, new_tokens=(1,), new_blocks=(0,), adapter="style")]))


def test_a_failing_step_forgets_everything_but_lives(executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    executor.forward(StepPlan(1, [GOOD]))
    assert executor.runner is not None

    def fail(step: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(executor.runner, "run", fail)
        with pytest.raises(InternalError, match=r"step 2 \(1 tokens\) failed on cpu: RuntimeError: out of memory"):
            executor.forward(StepPlan(2, [PlanRow(0, 5, 1, num_kept=5, num_kept_blocks=2, new_tokens=(1,))]))
    with pytest.raises(InternalError, match="but has"):
        executor.forward(StepPlan(3, [PlanRow(0, 5, 1, num_kept=5, num_kept_blocks=2, new_tokens=(1,))]))
    executor.forward(StepPlan(4, [GOOD]))
    assert len(executor.sample(SampleBatch(4, [SampleRow(0, 0, GREEDY)])).tokens) == 1


def test_the_request_that_breaks_the_model_ends_and_the_others_go_on(
    executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step that contains one sequence fails in the model; only this sequence's request ends with an error."""
    poison = 4
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    requests = [Request(str(n), tuple(prompt), sampling) for n, prompt in enumerate([*PROMPTS, [5, poison, 6]])]
    want = NaiveDriver(executor, PROMPTS).generate(6)
    executor.reset()
    assert executor.runner is not None
    run = executor.runner.run

    def fail_on_poison(step: Any) -> Tensor:
        if poison in step.input_ids.flatten().tolist():
            raise RuntimeError("device-side assert")
        return run(step)

    monkeypatch.setattr(executor.runner, "run", fail_on_poison)
    engine = Engine(executor, EngineConfig(enable_prefix_caching=False))
    for request in requests:
        engine.add(request)
    events = []
    while engine.has_work:
        events += engine.step()
    ends = {event.request_id: event for event in events if isinstance(event, Finished)}
    got = [[e.token for e in events if isinstance(e, TokenEvent) and e.request_id == r.id] for r in requests]
    assert got == [*want, []]
    assert [ends[r.id].error for r in requests[:-1]] == [None] * len(PROMPTS)
    assert isinstance(ends[requests[-1].id].error, InternalError)
    assert "device-side assert" in str(ends[requests[-1].id].error)


def test_close_is_idempotent(executor: LocalExecutor) -> None:
    executor.close()
    executor.close()
    with pytest.raises(ShardUnavailable, match="closed"):
        executor.forward(StepPlan(1, [GOOD]))


def test_reset_lets_steps_start_anew(executor: LocalExecutor) -> None:
    executor.forward(StepPlan(5, [GOOD]))
    executor.reset()
    executor.forward(StepPlan(1, [GOOD]))
    assert len(executor.sample(SampleBatch(1, [SampleRow(0, 0, GREEDY)])).tokens) == 1


# -- faster forms of the same model ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "smollm3"])
def test_dense_families_are_lowered(family: str) -> None:
    executor = load(tiny_checkpoints.cached_checkpoint(family))
    assert executor.runner is not None
    layers = executor.runner.model.model.layers  # type: ignore[union-attr]
    assert [type(layer).__name__ for layer in layers] == ["DenseLayer"] * 3  # type: ignore[union-attr]


def test_a_layer_of_another_make_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison while loading notices that Helium applies RoPE to other dimensions than Llama, so transformers'
    layers stay."""
    from bridle.model import dense_layer

    monkeypatch.setattr(dense_layer, "DENSE_FAMILIES", frozenset({"helium"}))
    path = tiny_checkpoints.cached_checkpoint("helium")
    executor = load(path)
    assert executor.runner is not None
    layers = executor.runner.model.model.layers  # type: ignore[union-attr]
    assert [type(layer).__name__ for layer in layers] == ["HeliumDecoderLayer"] * 3  # type: ignore[union-attr]
    assert NaiveDriver(executor, PROMPTS[:1]).generate(5) == [library_output(path, PROMPTS[0], 5)]


def test_packed_linear_is_the_same_layer() -> None:
    from bridle.model.linear import PackedLinear, is_worth_packing

    torch.manual_seed(0)
    linear = torch.nn.Linear(2048, 2050)
    packed = PackedLinear(linear)
    for shape in ((1, 2048), (1, 7, 2048), (33, 2048)):
        rows = torch.randn(shape)
        torch.testing.assert_close(packed(rows), linear(rows), atol=1e-5, rtol=1e-5)
    assert packed(torch.zeros(1, 0, 2048)).shape == (1, 0, 2050)
    assert torch.equal(packed.weight, linear.weight)
    both = PackedLinear(linear, keeps_plain=True)
    for shape in ((0, 2048), (1, 2048), (2, 2048), (3, 2048)):
        rows = torch.randn(shape)
        torch.testing.assert_close(both(rows), linear(rows), atol=1e-5, rtol=1e-5)
    assert both.weight.data_ptr() == linear.weight.data_ptr()
    assert is_worth_packing(linear) == torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    assert not is_worth_packing(torch.nn.Linear(32, 32))


# -- eight bits --------------------------------------------------------------------------------------------


def test_int8_rows_do_not_depend_on_their_neighbors() -> None:
    from bridle.model.quantize import Int8Linear

    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48)
    quantized = Int8Linear(linear)
    rows = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    together = quantized(rows)
    for number in range(40):
        assert torch.equal(quantized(rows[number : number + 1])[0], together[number])
    error = (together - linear(rows)).abs().amax(1)
    assert bool((error <= 0.03 * rows.abs().amax(1) + 1e-6).all())
    assert quantized(rows[:0]).shape == (0, 48)
    torch.testing.assert_close(quantized.weight, linear.weight, atol=2e-3, rtol=0)


def test_int8_model_generates_the_same_alone_and_in_a_batch() -> None:
    path = tiny_checkpoints.cached_checkpoint("llama")
    executor = load(path, quantization="int8")
    together = NaiveDriver(executor, PROMPTS).generate(16)
    alone = []
    for prompt in PROMPTS:
        executor.reset()
        alone += NaiveDriver(executor, [prompt]).generate(16)
    assert together == alone


def test_int8_logits_are_close() -> None:
    from bridle.model.check import check_model

    report = check_model(tiny_checkpoints.cached_checkpoint("llama"), max_tokens=48)
    eight = check_model(tiny_checkpoints.cached_checkpoint("llama"), quantization="int8", max_tokens=48)
    assert report.is_equal
    assert eight.num_same_greedy == eight.num_positions, "packed and eager passes share the same integers"


# -- through the engine ------------------------------------------------------------------------------------


def test_default_pool_and_info() -> None:
    executor = load_executor(
        ModelConfig(model=str(tiny_checkpoints.cached_checkpoint("llama"))), sampler=argmax_sampler
    )
    info = executor.info
    assert (info.vocab_size, info.max_model_len, info.block_size, info.kv) == (300, 512, 16, "paged")
    assert info.num_blocks == 64 * 512 // 16
    assert (info.dtype, info.device, info.eos_token_ids) == ("float32", "cpu", (tiny_checkpoints.EOS,))


def test_errors_are_ours() -> None:
    with pytest.raises(BridleError):
        load("/nonexistent/folder")
    with pytest.raises(InvalidRequest):
        ModelConfig(num_blocks=0)
