"""Property tests of the scheduler without an engine: budget, fairness, admission, preemption, and plans that a strict
executor accepts.

A minimal loop replaces the engine. It samples greedily, and forks, rolls back and suspends at random. The scripted
executor refuses any plan that is invalid or reads wrong KV.
"""

from __future__ import annotations

from random import Random
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.engine.scheduling.admission_order import PrefillGate
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import SequenceStatus
from tests.engine.scheduler_loop import Loop
from tests.engine.support import more


@more(2)
@given(st.integers(0, 1 << 40), st.sampled_from(["paged", "sequences"]))
def test_random_requests_keep_the_invariants_of_the_scheduler(seed: int, kv: Literal["paged", "sequences"]) -> None:
    random = Random(seed)
    budget, max_num_seqs = random.randint(1, 12), random.randint(1, 6)
    block_size = random.choice([1, 2, 4])
    num_blocks = random.randint(-(-12 // block_size), 40 // block_size)
    knobs = {
        "max_batch_prefill_tokens": random.choice([None, random.randint(1, budget)]),
        "chunked_prefill": random.random() < 0.7,
        "gate": random.choice([None, PrefillGate(random.choice([0.5, 3.0]), random.randint(0, 4))]),
    }
    loop = Loop(num_blocks, block_size, budget, max_num_seqs, kv, **knobs)
    for _ in range(60):
        if random.random() < 0.3:
            loop.add([random.randrange(3) for _ in range(random.randint(1, 9))], random.randint(10, 12))
        if loop.live and random.random() < 0.5:
            meddle(loop, random, random.choice(loop.live))
        plan = loop.step()
        assert plan.num_tokens <= budget
        assert len(plan.rows) <= max_num_seqs
    for seq in loop.live:
        seq.control.is_suspended = False
    loop.run_dry()
    assert not loop.executor.violations


def meddle(loop: Loop, random: Random, seq: Sequence) -> None:
    """Change `seq` at random, like a controller or a client between two steps."""
    verb = random.choice(["fork", "rewind", "splice", "suspend", "resume", "cancel"])
    drawn = seq.queue.status is SequenceStatus.RUNNING and seq.kv.num_computed == len(seq.tokens) - 1
    if verb == "fork" and drawn and len(loop.live) < 8:
        loop.fork(seq)
    elif verb == "rewind":
        seq.truncate(max(1, len(seq.tokens) - random.randint(1, 4)))
        loop.scheduler.on_rewind(seq)
    elif verb == "splice":
        for token in range(min(random.randint(1, 5), seq.max_len - 1 - len(seq.tokens))):
            seq.tokens.append(token % 3)
    elif verb == "cancel" and random.random() < 0.3:
        loop.finish(seq)
    else:
        seq.control.is_suspended = verb == "suspend"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 4))
def test_nobody_starves(lengths: list[int], budget: int, max_num_seqs: int) -> None:
    loop = Loop(num_blocks=9, block_size=4, budget=budget, max_num_seqs=max_num_seqs)
    for length in lengths:
        loop.add([1] * length, length + 5)
    loop.run_dry()


def test_prefill_chunks_ride_with_decodes() -> None:
    loop = Loop(num_blocks=32, budget=6)
    decoding = loop.add([1, 2], 30)
    loop.step()
    loop.add([3] * 20, 22)
    sizes = []
    for _ in range(4):
        plan = loop.step()
        by_id = {row.seq_id: row for row in plan.rows}
        assert by_id[decoding.id].num_scheduled == 1  # never held up by the prompt
        sizes.append(plan.num_tokens)
    assert sizes == [6, 6, 6, 6]


def test_every_running_sequence_gets_one_token_before_any_gets_two() -> None:
    loop = Loop(num_blocks=64, budget=4)
    seqs = [loop.add([i, i], 40) for i in range(1, 4)]
    for _ in range(3):
        loop.step()
    for token in [1] * 10:
        seqs[0].tokens.append(token)
    plan = loop.step()
    assert {row.seq_id: row.num_scheduled for row in plan.rows} == {1: 2, 2: 1, 3: 1}


def test_more_sequences_than_budget_take_turns() -> None:
    loop = Loop(num_blocks=64, budget=8)
    parent = loop.add([1, 2, 3], 30)
    loop.step()
    children = [loop.fork(parent) for _ in range(6)]
    loop.scheduler.max_num_batched_tokens = 2
    served = set()
    for _ in range(4):
        plan = loop.step()
        assert plan.num_tokens == 2
        served |= {row.seq_id for row in plan.rows}
    assert served == {parent.id, *(child.id for child in children)}


def test_urgent_requests_are_admitted_first() -> None:
    loop = Loop(num_blocks=3, budget=8)
    running = loop.add([1] * 8, 10)
    loop.step()
    later = loop.add([2] * 8, 10)
    urgent = loop.add([3] * 8, 10, priority=-1)
    order = []
    while loop.live:
        plan = loop.step()
        order += [row.seq_id for row in plan.rows if row.seq_id not in order]
    assert order == [running.id, urgent.id, later.id]


def test_admission_waits_for_room_for_the_whole_prompt() -> None:
    loop = Loop(num_blocks=4, budget=4)
    first = loop.add([1] * 9, 12)  # takes 3 of 4 blocks
    loop.step()
    second = loop.add([2] * 8, 9)
    while first in loop.live:
        plan = loop.step()
        assert second.id not in {row.seq_id for row in plan.rows} or first not in loop.live
    assert loop.scheduler.num_preemptions == 0
    loop.run_dry()


def test_the_victim_is_one_that_frees_blocks() -> None:
    """Preempting sequences that share all their blocks would free no memory, even if they are idle and new."""
    loop = Loop(num_blocks=8, budget=32)
    other = loop.add([3] * 8, 32)
    parent = loop.add([1] * 12, 32)
    loop.step()
    siblings = [parent, *(loop.fork(parent) for _ in range(2))]
    assert [loop.blocks.num_exclusive(seq) for seq in siblings] == [0, 0, 0]
    for seq in (other, *siblings):
        seq.control.is_suspended = True
    needy = loop.add([2] * 4, 32)
    while loop.scheduler.num_preemptions == 0:
        loop.step()
    assert [seq for seq in loop.live if seq.queue.status is SequenceStatus.WAITING] == [other]
    assert needy.queue.status is SequenceStatus.RUNNING


def test_suspended_sequences_are_preempted_first() -> None:
    loop = Loop(num_blocks=6, budget=32)
    held = loop.add([1] * 8, 12)
    busy = loop.add([2] * 8, 24)
    loop.step()
    held.control.is_suspended = True
    newest = loop.add([3] * 7, 8)
    loop.step()
    assert newest not in loop.live
    while held.queue.status is SequenceStatus.RUNNING:
        loop.step()
    assert loop.scheduler.num_preemptions == 1
    assert busy.queue.status is SequenceStatus.RUNNING
    held.control.is_suspended = False
    loop.run_dry()


def test_a_sequence_alone_can_use_every_block() -> None:
    loop = Loop(num_blocks=4, block_size=4)
    seq = loop.add([1] * 3, 16)
    while seq in loop.live:
        if len(seq.tokens) == 15:  # a rewind into a published block, with no block to spare
            seq.truncate(6)
            loop.scheduler.on_rewind(seq)
            seq.max_len = 14
        loop.step()


@given(st.integers(0, 5), st.booleans())
@settings(max_examples=10)
def test_reset_sends_everything_anew(num_steps: int, with_suspects: bool) -> None:
    loop = Loop(budget=6)
    seqs = [loop.add([i] * (3 + i), 12) for i in range(1, 4)]
    for _ in range(num_steps):
        loop.step()
    loop.executor.reset()
    loop.scheduler.reset(seqs if with_suspects else ())
    plan = loop.step()
    assert all(row.num_kept == 0 and row.start == 0 for row in plan.rows)
    assert len(plan.rows) == 1 if with_suspects else plan.num_tokens == 6
    loop.run_dry()


def test_kv_kept_by_sequence_is_counted_until_the_backend_gives_it_up() -> None:
    """A rolled-back sequence without a batch row still has its old tokens in the backend, and so does a preempted
    sequence until it is freed."""
    loop = Loop(num_blocks=8, block_size=1, budget=16, kv="sequences")
    rewound = loop.add([1] * 6, 8)
    loop.step()
    rewound.truncate(3)
    loop.scheduler.on_rewind(rewound)
    rewound.control.is_suspended = True
    loop.add([2] * 5, 7)
    loop.step()
    assert rewound.queue.status is SequenceStatus.WAITING  # preempted, as nothing less makes room
    rewound.control.is_suspended = False
    loop.run_dry()
    assert not loop.executor.violations
