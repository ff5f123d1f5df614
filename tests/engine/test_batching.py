"""The batching settings: their values, contradictions between them, and the rule that each guarantees in every step.

The tests classify the rows of a step: a row that ends within the prompt is prefill, and any other row is decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.admission_order import PrefillGate
from bridle.engine.scheduling.batching import Batching
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import SequenceStatus
from bridle.errors import ContextOverflow, InvalidRequest
from tests.engine.scheduler_loop import Loop, ample_loop
from tests.engine.support import Lab, make_request

INFO = ExecutorInfo("m", 32, max_model_len=512, num_blocks=128, block_size=16, max_num_batched_tokens=64)
SEED = st.integers(0, 1 << 40)


# -- what each comes to ------------------------------------------------------------------------------------------


def test_what_suits_the_backend() -> None:
    found = Batching.of(EngineConfig(), INFO)
    assert (found.max_batch_prefill_tokens, found.max_step_tokens) == (64, 64 + 256)  # a token for each beside prompts
    assert (found.max_batch_total_tokens, found.max_total_tokens, found.max_input_tokens) == (2048, 512, 512)
    assert found.waiting_served_ratio == 0  # with chunks nobody need wait


def test_whole_prompts_must_fit_into_a_step_and_wait_for_each_other() -> None:
    found = Batching.of(EngineConfig(chunked_prefill=False), INFO)
    assert (found.max_input_tokens, found.max_batch_prefill_tokens) == (64, 64)
    assert found.waiting_served_ratio > 0
    longer = Batching.of(EngineConfig(chunked_prefill=False, max_input_tokens=200), INFO)
    assert longer.max_batch_prefill_tokens == 200


def test_a_bound_on_waiting_has_an_effect_by_itself() -> None:
    assert Batching.of(EngineConfig(max_waiting_tokens=5), INFO).waiting_served_ratio > 0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_total_tokens": 513}, "max_total_tokens is 513; the model's context has 512"),
        ({"max_total_tokens": 400, "max_batch_total_tokens": 320}, "holds only 320 tokens"),
        ({"max_batch_total_tokens": 2049}, "max_batch_total_tokens is 2049, but the KV cache holds only 2048"),
        ({"max_input_tokens": 512}, "must be less than max_total_tokens"),
        ({"max_batch_prefill_tokens": 65, "max_num_batched_tokens": 64}, "a step has at most 64 tokens"),
        (
            {"max_input_tokens": 100, "max_batch_prefill_tokens": 64, "chunked_prefill": False},
            "each prompt is computed in one step of at most 64 tokens",
        ),
        ({"max_batch_prefill_tokens": 0}, "max_batch_prefill_tokens is 0; must be at least 1"),
        ({"waiting_served_ratio": -0.5}, "waiting_served_ratio is -0.5; must be at least 0"),
        ({"waiting_served_ratio": float("nan")}, "waiting_served_ratio is nan"),
        ({"max_waiting_tokens": -1}, "max_waiting_tokens is -1; must be at least 0"),
    ],
)
def test_contradictions_name_both_values(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Batching.of(EngineConfig(**knobs), INFO)


@given(SEED)
def test_limiting_twice_changes_nothing(seed: int) -> None:
    """A replica's engine applies the settings, and the router applies the same settings again to the replica's
    description."""
    config = random_config(Random(seed))
    found = Batching.of(config, INFO)
    limited = found.limit(INFO)
    assert Batching.of(config, limited) == found
    assert found.limit(limited) == limited


def random_config(random: Random) -> EngineConfig:
    def maybe(low: int, high: int) -> int | None:
        return random.choice([None, random.randint(low, high)])

    return EngineConfig(
        max_batch_prefill_tokens=maybe(100, 300),
        max_num_batched_tokens=maybe(300, 600),
        max_batch_total_tokens=maybe(400, 2048),
        max_num_seqs=maybe(1, 400),
        max_total_tokens=maybe(101, 400),
        max_input_tokens=maybe(1, 100),
        waiting_served_ratio=random.choice([None, 0.0, 1.2]),
        max_waiting_tokens=maybe(0, 30),
        chunked_prefill=random.random() < 0.5,
    )


def test_requests_beyond_the_limits_are_refused() -> None:
    lab = Lab(num_blocks=32, block_size=4, max_input_tokens=6, max_total_tokens=10)
    lab.run(make_request([1] * 6, max_tokens=4))
    with pytest.raises(ContextOverflow, match="the prompt has 7 tokens; max_input_tokens is 6"):
        lab.engine.add(make_request([1] * 7, max_tokens=1))
    with pytest.raises(ContextOverflow, match="at most 10 tokens fit"):
        lab.engine.add(make_request([1] * 6, max_tokens=5))


# -- the gate ----------------------------------------------------------------------------------------------------


def test_the_gate_opens_for_enough_prompts_or_after_enough_steps() -> None:
    gate = PrefillGate(ratio=0.5, max_steps=2)
    assert gate.is_open(1, 0)
    assert not gate.is_open(1, 4) and gate.is_open(2, 4)
    for expected in (False, False, True):
        assert gate.is_open(1, 4) is expected
        gate.note(had_prompts=False, had_decodes=True)
    gate.note(had_prompts=True, had_decodes=True)
    assert not gate.is_open(1, 4)


def test_steps_without_anything_do_not_count() -> None:
    gate = PrefillGate(ratio=1.0, max_steps=1)
    gate.note(had_prompts=False, had_decodes=False)
    assert not gate.is_open(1, 2)


# -- every step --------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """The content of one step: the tokens of each prompt, the decoding sequences, and the prompts left in the queue."""

    prompts: dict[int, int] = field(default_factory=dict)
    decodes: set[int] = field(default_factory=set)
    num_queued: int = 0
    num_admitted: int = 0


def play(loop: Loop, random: Random, num_requests: int, longest: int) -> Iterator[Step]:
    """Run requests, some of which arrive while others run. Yields each step after it is done."""
    left, known = num_requests, {}
    for _ in range(4_000):
        while left and random.random() < 0.3:
            num_prompt = random.randint(1, longest)
            prompt = [random.randrange(3) for _ in range(num_prompt)]
            seq = loop.add(prompt, num_prompt + random.randint(1, 12))
            known[seq.id] = seq
            left -= 1
        if not (left or loop.live):
            return
        queued = [seq for seq in loop.live if seq.queue.status is SequenceStatus.WAITING]
        step = observe(loop, known)
        step.num_queued = sum(seq.queue.status is SequenceStatus.WAITING for seq in queued)
        step.num_admitted = len(queued) - step.num_queued
        yield step
    raise AssertionError(f"{len(loop.live)} sequences starve")


def observe(loop: Loop, known: dict[int, Sequence]) -> Step:
    step = Step()
    for row in loop.step().rows:
        if row.start + row.num_scheduled <= known[row.seq_id].num_prompt:
            step.prompts[row.seq_id] = row.num_scheduled
        else:
            step.decodes.add(row.seq_id)
    return step


@given(SEED)
def test_prompts_get_no_more_than_their_part_of_a_step(seed: int) -> None:
    random = Random(seed)
    most = random.randint(1, 20)
    loop = ample_loop(random, max_batch_prefill_tokens=most, chunked_prefill=random.random() < 0.7)
    longest = most if not loop.scheduler._in_chunks else 40
    for step in play(loop, random, 12, longest):
        assert sum(step.prompts.values()) <= most


@given(SEED)
def test_with_chunks_nobody_who_decodes_is_passed_over(seed: int) -> None:
    random = Random(seed)
    loop = ample_loop(random, max_batch_prefill_tokens=random.randint(1, 20))
    decoding: set[int] = set()
    for step in play(loop, random, 12, 40):
        assert decoding & {seq.id for seq in loop.live} <= step.decodes
        decoding = {seq.id for seq in loop.live if len(seq.tokens) > seq.num_prompt}


@given(SEED)
def test_without_chunks_prompts_come_whole_and_alone(seed: int) -> None:
    random = Random(seed)
    loop = ample_loop(random, max_batch_prefill_tokens=random.randint(20, 60), chunked_prefill=False)
    seen: set[int] = set()
    for step in play(loop, random, 12, 20):
        assert not (step.prompts and step.decodes)
        assert not seen & set(step.prompts)  # one step is enough for each
        seen |= set(step.prompts)


@given(SEED)
def test_queued_prompts_wait_no_longer_than_they_may(seed: int) -> None:
    """At most `max_waiting_tokens` consecutive steps leave an admissible prompt in the queue while other sequences
    decode."""
    random = Random(seed)
    most = random.randint(0, 8)
    gate = PrefillGate(random.choice([0.3, 1.0, 50.0]), most)
    loop = ample_loop(random, max_batch_prefill_tokens=64, chunked_prefill=random.random() < 0.5, gate=gate)
    num_steps = 0
    for step in play(loop, random, 16, 30):
        num_steps = num_steps + 1 if step.num_queued and step.decodes and not step.prompts else 0
        assert num_steps <= most


@given(SEED)
def test_streams_have_their_time_unless_enough_prompts_wait(seed: int) -> None:
    """Prompts are admitted together with decoding sequences if enough prompts wait, or after `max_waiting_tokens` steps
    of only decoding."""
    random = Random(seed)
    ratio, most = random.choice([0.5, 1.0, 50.0]), random.randint(1, 8)
    loop = ample_loop(random, max_batch_prefill_tokens=64, gate=PrefillGate(ratio, most))
    alone = num_decoding = 0
    for step in play(loop, random, 16, 30):
        if step.num_admitted and num_decoding and alone < most:
            assert step.num_admitted + step.num_queued >= ratio * num_decoding
        alone = 0 if step.prompts else alone + bool(step.decodes)
        num_decoding = sum(len(seq.tokens) > seq.num_prompt for seq in loop.live)


@given(SEED)
def test_the_batch_holds_no_more_than_it_may(seed: int) -> None:
    random = Random(seed)
    size, total = random.randint(1, 6), random.randrange(48, 120, 4)
    lab = Lab(num_blocks=400, block_size=4, max_num_seqs=size, max_batch_total_tokens=total)
    for _ in range(10):
        lab.engine.add(make_request([random.randrange(3) for _ in range(random.randint(1, 20))], max_tokens=10))
    while lab.engine.has_work:
        lab.step()
        statistics = lab.engine.statistics()
        assert statistics.num_running <= size
        assert 4 * (statistics.num_blocks - statistics.num_free_blocks) <= total


def test_a_sequence_too_long_for_any_step_of_its_own_is_computed_in_several() -> None:
    """A preempted sequence with more tokens than a prompt may have must still be resumed."""
    knobs: dict[str, Any] = {"max_batch_prefill_tokens": 10, "chunked_prefill": False}
    loop = Loop(num_blocks=400, budget=100, kv="sequences", **knobs)  # where no cache shortens it
    loop.add([1] * 4, 40)
    long = loop.add([2] * 8, 40)
    while len(long.tokens) < 25:
        loop.step()
    loop.scheduler.preempt(long)
    sizes = [loop.step().num_tokens for _ in range(2)]
    assert sizes == [10, 10]
    loop.run_dry()
    assert not loop.executor.violations
