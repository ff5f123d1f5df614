"""Tests of the scripted executor: valid plans give the model's logits, and every kind of invalid plan is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bridle.engine.control.decision import mask_of
from bridle.engine.scheduling.step_plan import (
    BlockCopy,
    ForkRow,
    PlanRow,
    SampleBatch,
    SampleRow,
    ScoreRun,
    StepPlan,
    StepResult,
)
from bridle.errors import BridleError, InternalError, ShardUnavailable
from bridle.sampling import SamplingParams
from bridle.testing.clock import FakeClock
from bridle.testing.logits import ScriptedModel, uniform
from bridle.testing.sampler import logprob_of, sample_row
from bridle.testing.scripted import ScriptedExecutor

GREEDY = SamplingParams(temperature=0.0)


def greedy(executor: ScriptedExecutor, step: int, *sources: tuple[int, int]) -> list[int]:
    """Return tokens sampled greedily from (sequence, logits row) pairs of a step."""
    rows = [SampleRow(seq_id, index, GREEDY) for seq_id, index in sources]
    return executor.sample(SampleBatch(step, rows)).tokens


def started(**options: object) -> ScriptedExecutor:
    """Return an executor that has computed tokens 1 2 3 4 5 6 of sequence 1 in blocks 0 and 1, at step 1."""
    executor = ScriptedExecutor(8, 8, 4, **options)  # type: ignore[arg-type]
    row = PlanRow(1, 0, 6, new_tokens=(1, 2, 3, 4, 5, 6), new_blocks=(0, 1), num_prompt=6)
    executor.forward(StepPlan(1, [row]))
    return executor


def best_after(executor: ScriptedExecutor, *tokens: int) -> int:
    return int(np.argmax(executor.model.row_after(tokens)))


@pytest.mark.parametrize("kv", ["paged", "sequences"])
def test_logits_come_from_the_whole_prefix(kv: str) -> None:
    executor = started(kv=kv)
    assert greedy(executor, 1, (1, 0)) == [best_after(executor, 1, 2, 3, 4, 5, 6)]
    executor.forward(StepPlan(2, [PlanRow(1, 6, 1, 1, 6, (7,), 2, (), 6)]))
    assert greedy(executor, 2, (1, 0)) == [best_after(executor, 1, 2, 3, 4, 5, 6, 7)]


@pytest.mark.parametrize("kv", ["paged", "sequences"])
def test_fork_then_both_write(kv: str) -> None:
    executor = started(kv=kv)
    plan = StepPlan(
        2,
        rows=[PlanRow(1, 6, 1, 1, 6, (7,), 1, (3,), 6), PlanRow(2, 6, 1, 1, 6, (0,), 2, (), 6)],
        forks=[ForkRow(1, 2, 6, 2)],
        copies=[BlockCopy(1, 3)],
    )
    executor.forward(plan)
    expected = [best_after(executor, 1, 2, 3, 4, 5, 6, last) for last in (7, 0)]
    assert greedy(executor, 2, (1, 0), (2, 1)) == expected


def test_cached_prefix_is_read_from_its_blocks() -> None:
    executor = started()
    row = PlanRow(2, 4, 2, new_tokens=(1, 2, 3, 4, 0, 0), new_blocks=(0, 4), num_prompt=6)
    executor.forward(StepPlan(2, [row], freed=[1]))
    assert greedy(executor, 2, (2, 0)) == [best_after(executor, 1, 2, 3, 4, 0, 0)]


WRONG_PLANS: dict[str, StepPlan] = {
    "follows step": StepPlan(1),
    "is unknown": StepPlan(2, forks=[ForkRow(7, 8, 1, 1)]),
    "which exists": StepPlan(2, forks=[ForkRow(1, 1, 1, 1)]),
    "two rows in one plan": StepPlan(2, [PlanRow(1, 5, 1, 1, 6, (), 2)] * 2),
    "keeps 7 tokens of 6": StepPlan(2, [PlanRow(1, 6, 1, 1, 7, (7,), 2)]),
    "keeps 3 blocks of 2": StepPlan(2, [PlanRow(1, 6, 1, 1, 6, (7,), 3)]),
    "computes up to 8 of 7 tokens": StepPlan(2, [PlanRow(1, 6, 2, 1, 6, (7,), 2)]),
    "schedules 0 tokens": StepPlan(2, [PlanRow(1, 6, 0, 0, 6, (7,), 2)]),
    "2 logits rows of 1 positions": StepPlan(2, [PlanRow(1, 6, 1, 2, 6, (7,), 2)]),
    "not in the vocabulary": StepPlan(2, [PlanRow(1, 6, 1, 1, 6, (8,), 2)]),
    "has 1 blocks for 7 of 7": StepPlan(2, [PlanRow(1, 6, 1, 1, 6, (7,), 1)]),
    "has 3 blocks for 7 of 7": StepPlan(2, [PlanRow(1, 6, 1, 1, 6, (7,), 2, (5,))]),
    "maps a block twice": StepPlan(2, [PlanRow(1, 4, 3, 1, 6, (7,), 1, (0,))]),
    "maps block 8 of 8": StepPlan(2, [PlanRow(1, 4, 3, 1, 6, (7,), 1, (8,))]),
    "changes its adapter": StepPlan(2, [PlanRow(1, 6, 1, 1, 6, (7,), 2, adapter="a")]),
    "leaves the pool": StepPlan(2, copies=[BlockCopy(1, 8)]),
    "target of two copies": StepPlan(2, copies=[BlockCopy(0, 4), BlockCopy(1, 4)]),
    "reads the target of an earlier one": StepPlan(2, copies=[BlockCopy(0, 4), BlockCopy(4, 5)]),
    # KV that is not there, or belongs to something else
    "wrong KV at position 6": StepPlan(2, [PlanRow(1, 7, 1, 1, 6, (7, 7), 2)]),
    "wrong KV at position 4": StepPlan(2, [PlanRow(1, 6, 1, 1, 6, (7,), 1, (5,))]),
    "wrong KV at position 2": StepPlan(2, [PlanRow(1, 5, 2, 1, 2, (0, 0, 0, 0, 0), 2)]),
    "wrong KV at position 0": StepPlan(2, [PlanRow(2, 4, 1, new_tokens=(1, 2, 3, 0, 5), new_blocks=(0, 5))]),
}


@pytest.mark.parametrize("message", WRONG_PLANS)
def test_wrong_plan_is_refused(message: str) -> None:
    executor = started()
    with pytest.raises(InternalError, match=message.replace("position 0", "position 3")):
        executor.forward(WRONG_PLANS[message])
    assert len(executor.violations) == 1


def test_write_into_a_block_of_another_row_is_refused() -> None:
    executor = started()
    rows = [PlanRow(1, 6, 1, 1, 6, (7,), 2, (), 6), PlanRow(2, 5, 1, 1, 6, (), 2, (), 6)]
    with pytest.raises(InternalError, match="writes block 1, which another row maps too"):
        executor.forward(StepPlan(2, rows, forks=[ForkRow(1, 2, 6, 2)]))


def test_forgotten_copy_shows_when_the_other_reads() -> None:
    executor = started()
    fork = StepPlan(2, [PlanRow(1, 5, 2, 1, 5, (0, 0), 2)], forks=[ForkRow(1, 2, 6, 2)])
    executor.forward(fork)  # overwrites position 5 of the child, which has no row yet
    with pytest.raises(InternalError, match="wrong KV at position 5"):
        executor.forward(StepPlan(3, [PlanRow(2, 6, 1, 1, 6, (7,), 2)]))


def test_sequences_keeping_refuses_a_start_beyond_its_cells() -> None:
    executor = started(kv="sequences")
    with pytest.raises(InternalError, match="starts at 7, but has 6 KV cells"):
        executor.forward(StepPlan(2, [PlanRow(1, 7, 1, 1, 6, (7, 7))]))


def test_sequences_keeping_counts_cells_and_shares_them_in_forks() -> None:
    executor = started(kv="sequences")
    forks = [ForkRow(1, i, 6, 2) for i in range(2, 7)]
    executor.forward(StepPlan(2, [PlanRow(i, 6, 1, 1, 6, (7,)) for i in range(2, 7)], forks=forks))
    fill = PlanRow(9, 0, 22, new_tokens=(1,) * 22)
    with pytest.raises(InternalError, match="33 KV cells are in use; the capacity is 32"):
        executor.forward(StepPlan(3, [fill]))


WRONG_BATCHES: dict[str, SampleBatch] = {
    "samples step 2": SampleBatch(2),
    "logits row 1 of 1": SampleBatch(1, [SampleRow(1, 1, GREEDY)]),
    "belongs to sequence 1, not 2": SampleBatch(1, [SampleRow(2, 0, GREEDY)]),
    "a mask has 1 bytes, not 4": SampleBatch(1, [SampleRow(1, 0, GREEDY, mask=b"\1")]),
    "bias of token 8": SampleBatch(1, [SampleRow(1, 0, GREEDY, bias=((8, 1.0),))]),
    "draw number -1": SampleBatch(1, [SampleRow(1, 0, GREEDY, draw=-1)]),
    "logits row 1 ": SampleBatch(1, scores=[ScoreRun(1, 0, (1, 2))]),
}


@pytest.mark.parametrize("message", WRONG_BATCHES)
def test_wrong_batch_is_refused(message: str) -> None:
    with pytest.raises(InternalError, match=message):
        started().sample(WRONG_BATCHES[message])


def test_drawing_before_the_end_of_the_tokens_is_refused() -> None:
    executor = started()
    executor.forward(StepPlan(2, [PlanRow(1, 6, 1, 1, 6, (7, 7), 2)]))
    with pytest.raises(InternalError, match="samples after position 6 of 8 tokens"):
        greedy(executor, 2, (1, 0))


def test_scoring_another_token_than_the_next_is_refused() -> None:
    executor = ScriptedExecutor(8, 8, 4)
    executor.forward(StepPlan(1, [PlanRow(1, 0, 3, 3, new_tokens=(1, 2, 3), new_blocks=(0,))]))
    with pytest.raises(InternalError, match=r"scores token 4 where \[3\] follows"):
        executor.sample(SampleBatch(1, scores=[ScoreRun(1, 0, (2, 4))]))


def test_a_single_token_may_be_scored_in_place_of_the_next() -> None:
    """The scored token may be one of the options of a choice."""
    executor = ScriptedExecutor(8, 8, 4)
    executor.forward(StepPlan(1, [PlanRow(1, 0, 3, 3, new_tokens=(1, 2, 3), new_blocks=(0,))]))
    (scores,) = executor.sample(SampleBatch(1, scores=[ScoreRun(1, 0, (4,))])).scores
    assert len(scores) == 1


def test_sampling_twice_is_refused() -> None:
    executor = started()
    greedy(executor, 1, (1, 0))
    with pytest.raises(InternalError, match="sampled twice"):
        greedy(executor, 1, (1, 0))


def test_scores_are_the_models_log_probabilities() -> None:
    executor = ScriptedExecutor(8, 8, 4)
    executor.forward(StepPlan(1, [PlanRow(1, 0, 3, 3, new_tokens=(1, 2, 3), new_blocks=(0,))]))
    (scores,) = executor.sample(SampleBatch(1, scores=[ScoreRun(1, 0, (2, 3, 0), 2)])).scores
    for prefix, token, score in (((1,), 2, scores[0]), ((1, 2), 3, scores[1]), ((1, 2, 3), 0, scores[2])):
        row = executor.model.row_after(prefix)
        probs = np.exp(row) / np.exp(row).sum()
        assert score.token == token
        assert math.isclose(score.logprob, math.log(probs[token]), abs_tol=1e-12)
        assert [t for t, _ in score.top] == list(np.argsort(-row, kind="stable")[:2])
        assert score.rank == 1 + (row > row[token]).sum()


def test_faults_come_before_anything_is_done() -> None:
    executor = ScriptedExecutor(8, 8, 4, faults={1: BridleError("boom")}, sample_faults={0: BridleError("bang")})
    plans = [StepPlan(i, [PlanRow(i, 0, 1, new_tokens=(i,), new_blocks=(i,))]) for i in (1, 2, 3)]
    executor.forward(plans[0])
    with pytest.raises(BridleError, match="bang"):
        executor.sample(SampleBatch(1))
    with pytest.raises(BridleError, match="boom"):
        executor.forward(plans[1])
    assert executor.num_mirrors == 1
    executor.forward(plans[2])


def test_lost_shard_takes_the_mirrors() -> None:
    executor = ScriptedExecutor(8, 8, 4, faults={0: ShardUnavailable("gone")})
    with pytest.raises(ShardUnavailable):
        executor.forward(StepPlan(1))
    assert executor.num_mirrors == 0


def test_device_time_passes_on_the_clock_in_sample() -> None:
    clock = FakeClock(100.0)
    executor = started(clock=clock, device_time=lambda plan: 0.5 * plan.num_tokens)
    assert clock() == 100.0
    clock.advance(1.0)
    greedy(executor, 1, (1, 0))
    assert clock() == 103.0


def test_next_token_decides() -> None:
    executor = started(next_token=lambda prefix: sum(prefix) % 8)
    assert greedy(executor, 1, (1, 0)) == [21 % 8]


def test_prefix_order_and_adapter_matter() -> None:
    model = ScriptedModel(64)
    rows = [
        model.row_after((1, 2, 3)),
        model.row_after((2, 1, 3)),
        model.row_after((1, 2, 3), "a"),
        ScriptedModel(64, 1).row_after((1, 2, 3)),
    ]
    assert len({row.tobytes() for row in rows}) == 4


# -- the sampler ---------------------------------------------------------------------------------------------

ROW = np.array([1.0, 3.0, 2.0, 3.0])


def draw(sampling: SamplingParams, history: tuple[int, ...] = (), num_prompt: int = 0, **row: object) -> int:
    return sample_row(ROW, SampleRow(1, 0, sampling, **row), history, num_prompt)[0]  # type: ignore[arg-type]


def support(sampling: SamplingParams, **row: object) -> set[int]:
    """Return all tokens that occur in a hundred samples."""
    return {draw(sampling, draw=i, key=7, **row) for i in range(100)}


def test_greedy_takes_the_lower_id_on_a_tie() -> None:
    assert draw(GREEDY) == 1


def test_mask_and_bias_steer() -> None:
    assert draw(GREEDY, mask=mask_of([0, 2], 4)) == 2
    assert draw(GREEDY, bias=((0, 5.0),)) == 0
    assert draw(GREEDY.with_(logit_bias={0: 5.0}), bias=((1, 9.0),)) == 1
    assert draw(GREEDY, bias=((1, -math.inf), (3, -math.inf))) == 2


def test_nothing_left_is_minus_one() -> None:
    assert sample_row(ROW, SampleRow(1, 0, GREEDY, mask=bytes(4)), (), 0) == (-1, None)
    assert draw(GREEDY, mask=mask_of([1], 4), bias=((1, -math.inf),)) == -1


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), {0, 1, 2, 3}),
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_k=3), {1, 2, 3}),
        (SamplingParams(top_p=0.5), {1, 3}),
        (SamplingParams(top_p=0.01), {1}),
        (SamplingParams(min_p=0.3), {1, 2, 3}),
        (SamplingParams(min_p=1.0), {1, 3}),
        (SamplingParams(temperature=0.01), {1, 3}),
        (SamplingParams(typical_p=0.3), {1}),
    ],
)
def test_a_sampling_parameter_leaves_the_tokens_it_names(sampling: SamplingParams, expected: set[int]) -> None:
    assert support(sampling) == expected


def test_penalties_look_at_history() -> None:
    assert draw(GREEDY.with_(repetition_penalty=2.0), (1, 3), 2) == 2
    assert draw(GREEDY.with_(presence_penalty=1.5), (1, 3), 2) == 1  # prompt tokens do not count
    assert draw(GREEDY.with_(presence_penalty=1.5), (1, 3), 0) == 2
    assert draw(GREEDY.with_(frequency_penalty=0.6), (1, 1, 3), 0) == 3


def test_draws_follow_the_distribution() -> None:
    probs = np.exp(ROW) / np.exp(ROW).sum()
    counts = np.bincount([draw(SamplingParams(), key=3, draw=i) for i in range(4000)], minlength=4)
    assert np.abs(counts / 4000 - probs).max() < 0.03


def test_random_numbers_depend_on_key_and_draw_only() -> None:
    numbers = {uniform(key, number) for key in range(20) for number in range(20)}
    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize(("mode", "token"), [("raw", 1), ("processed", 2)])
def test_raw_and_processed_logprobs_are_reported(mode: str, token: int) -> None:
    sampling = GREEDY.with_(logprobs=4, logprobs_mode=mode)
    _, logprob = sample_row(ROW, SampleRow(1, 0, sampling, mask=mask_of([0, 2], 4)), (), 0)
    assert logprob is not None
    assert logprob.token == 2
    assert logprob.top[0][0] == token
    assert len(logprob.top) == (4 if mode == "raw" else 2)
    assert logprob == (logprob_of(ROW, 2, 4) if mode == "raw" else logprob)


def test_results_are_plain_data() -> None:
    result = started().sample(SampleBatch(1, [SampleRow(1, 0, GREEDY.with_(logprobs=1))]))
    assert isinstance(result, StepResult)
    assert result.logprobs[0] is not None
    assert {type(result.tokens[0]), type(result.logprobs[0].token)} == {int}
    assert type(result.logprobs[0].logprob) is float
