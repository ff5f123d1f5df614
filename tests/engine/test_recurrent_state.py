"""Tests of recurrent states together with KV blocks: each batch row always continues from the state of its own tokens.

In the scripted executor a state is a digest of all its tokens. The executor refuses a row that continues from a wrong
state.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given

from bridle.distributed.codec.step_plan import decode_plan, encode_plan
from bridle.engine.control.decision import Branch, Decision
from bridle.engine.kv.state_manager import StateManager
from bridle.engine.scheduling.step_plan import PlanRow, StateCopy, StateSave, StepPlan
from bridle.errors import InternalError
from bridle.testing.kv import FakeStates
from tests.engine.programs import always, script
from tests.engine.random_labs import LABS, LATE, ON_TIME, SEED, maker, random_lab, run_staggered
from tests.engine.rewind_properties import at
from tests.engine.support import Lab, check_against_reference, make_request, make_sequence, scheduler_of


def states_of(lab: Lab) -> StateManager:
    return scheduler_of(lab.engine).blocks.states


@LABS
@given(seed=SEED)
def test_outputs_are_those_of_the_oracle(seed: int, kind: type[Lab]) -> None:
    """The requests have forks, rollbacks, drafts, preemption, prefix hits and late controllers, with few state slots.
    Each step checks integrity, and the executor checks each state."""
    random = Random(seed)
    lab = random_lab(random, "paged", kind, num_states=random.choice([1, 2, 3, 5, 9, 40]))
    make = maker(random, kind)
    requests = [make(random, random.choice([ON_TIME, LATE])) for _ in range(random.randint(1, 7))]
    replays = run_staggered(lab, requests, random)
    for request in requests:
        check_against_reference(lab, request, replays[request.id])
    found = lab.engine.statistics()
    assert found.num_free_states + found.num_kept_states == found.num_states


@given(seed=SEED)
def test_plans_of_models_without_recurrent_layers_name_no_states(seed: int) -> None:
    random = Random(seed)
    lab = random_lab(random, "paged", Lab, record=True)
    make = maker(random, Lab)
    run_staggered(lab, [make(random, ON_TIME) for _ in range(random.randint(1, 5))], random)
    assert lab.executor.plans
    for plan in lab.executor.plans:
        assert not plan.state_copies
        assert all((row.state, row.saves) == (-1, ()) for row in plan.rows)
    assert lab.engine.statistics().num_states == 0


def cached(lab: Lab, prompt: list[int], **fields: object) -> int:
    fields = {"max_tokens": 1, **fields}
    return lab.run_one(prompt, **fields).first.usage.cached_tokens


def test_a_prompt_that_came_before_is_found_at_its_last_full_block() -> None:
    lab, prompt = Lab(num_states=8), [token % 7 for token in range(14)]
    assert [cached(lab, prompt), cached(lab, prompt), cached(lab, [*prompt, 1, 2, 3])] == [0, 12, 12]


def test_a_prompt_is_found_where_another_has_left_it_only_once_that_was_seen() -> None:
    """A block without a state is of no use. The first prompt that diverges from the chain computes all of it and stores
    the state at that point, so later prompts continue there."""
    lab, common = Lab(num_states=8), [token % 7 for token in range(16)]
    assert cached(lab, [*common, *[1] * 9]) == 0
    assert cached(lab, [*common, *[2] * 9]) == 0
    assert cached(lab, [*common, *[3] * 9]) == 16


def test_a_conversation_is_found_at_the_end_of_its_answer() -> None:
    lab = Lab(num_states=8)
    got = lab.run_one([1, 2, 3], max_tokens=10, temperature=0.0)
    assert cached(lab, [1, 2, 3, *got.first.tokens, 9, 9, 9, 9]) == 12


def test_long_prompts_keep_states_on_the_way() -> None:
    lab = Lab(num_states=40, num_blocks=400, max_num_batched_tokens=2_000)
    prompt = [token % 11 for token in range(1_200)]
    assert cached(lab, prompt) == 0
    assert cached(lab, [*prompt[:1_100], *[1] * 100]) == 1_024
    assert cached(lab, [*prompt[:700], *[1] * 100]) == 512


def test_without_a_prefix_cache_nothing_is_found_but_rewinds_still_have_states() -> None:
    lab, prompt = Lab(num_states=8, enable_prefix_caching=False), [token % 7 for token in range(14)]
    assert [cached(lab, prompt), cached(lab, prompt)] == [0, 0]
    lab.run_one(prompt, controller=at(30, Decision.splice(3, (2,))), max_tokens=30)
    assert states_of(lab).num_rewound_tokens == 26 - 24


@pytest.mark.parametrize("backtrack", [1, 3, 5, 9, 17, 22])
def test_a_rewind_computes_from_the_nearest_state_on(backtrack: int) -> None:
    """Each block of the answer and the last block of the prompt have a state. Only tokens after the nearest state are
    computed again."""
    prompt = [token % 7 for token in range(14)]
    lab, plain = Lab(num_states=8), Lab()
    fields = {"max_tokens": 30, "temperature": 0.0}
    got, want = (
        each.run_one(prompt, controller=at(30, Decision.splice(backtrack, (2,))), **fields) for each in (lab, plain)
    )
    assert got.first.tokens == want.first.tokens
    valid = 30 - backtrack - 1  # the last token that is left gives logits, so it is computed again in any case
    nearest = valid // 4 * 4 if valid >= 12 else 0
    assert states_of(lab).num_rewound_tokens == valid - nearest


def test_a_fork_costs_a_state_for_each_branch_that_computes() -> None:
    lab = Lab(num_states=40, record=True)
    lab.run_one([1, 2, 3], controller=script(Decision.sample(), Decision.fork([Branch()] * 3)), max_tokens=4)
    copies = [copy for plan in lab.executor.plans for copy in plan.state_copies]
    assert len(copies) == 2
    assert len({copy.source for copy in copies}) == 1


def test_one_slot_is_enough_for_any_number_of_outputs() -> None:
    lab = Lab(num_states=1)
    request = make_request([1, 2, 3, 4, 5], n=4, max_tokens=9)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    assert lab.engine.statistics().num_preemptions > 0


def test_rejected_drafts_are_computed_again_from_the_state_before_them() -> None:
    """Drafts copy a repeating text, and the end of each draft is wrong. Only the accepted draft tokens are computed
    again."""
    lab = Lab(num_states=8, next_token=lambda prefix: 9 if len(prefix) % 6 == 0 else prefix[-1] % 3 + 1)
    request = make_request([1, 2, 3, 1, 2, 3, 1, 2], max_tokens=40, temperature=0.0, speculate=4)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    assert got.first.usage.drafted_tokens > got.first.usage.accepted_tokens > 0
    assert states_of(lab).num_rewound_tokens <= got.first.usage.drafted_tokens


def test_a_rewind_to_before_the_drafts_does_not_take_the_state_before_them() -> None:
    states, seq = StateManager(4, 4, lambda digest: False), make_sequence(1, [1, 2, 3])
    states.admit(seq, None, 0, 0)
    states.make_writable(seq)
    row = PlanRow(1, 0, 5, new_tokens=(1, 2, 3, 8, 9), state=0)
    states.plan(seq, row, 3)
    assert [save.position for save in row.saves] == [3]
    seq.kv.num_computed = 3
    states.publish(seq, [])
    states.check_integrity([seq])
    seq.kv.num_computed = 2
    states.settle(seq, [])
    assert (seq.kv.num_computed, states.num_free, states.num_rewound_tokens) == (0, 3, 2)
    states.check_integrity([seq])


def test_states_of_retained_conversations_are_evicted_last() -> None:
    """Other requests fill all slots repeatedly, and the last state of a retained conversation is still found."""
    lab = Lab(num_states=6, num_blocks=200, park_seconds=1_000.0)
    plain = Lab().run_one([1, 2, 3, 4, 5], max_tokens=10, temperature=0.0).first.tokens
    got = lab.run_one([1, 2, 3, 4, 5], temperature=0.0, parks=True, stop_token_ids=[plain[-1]], max_tokens=40)
    assert lab.engine.statistics().num_parked == 1
    for number in range(12):
        cached(lab, [number % 30, *[token % 5 for token in range(20)]], max_tokens=8)
    assert cached(lab, [1, 2, 3, 4, 5, *got.first.tokens, 7, 7]) == 12


def test_evicted_states_shorten_the_match_to_one_that_is_left() -> None:
    lab, prompt = Lab(num_states=2, num_blocks=200), [token % 7 for token in range(14)]
    cached(lab, prompt)
    for number in range(4):
        cached(lab, [number + 10] * 14)
    assert cached(lab, prompt) == 0


def test_states_travel_with_the_plan() -> None:
    row = PlanRow(
        3, 4, 6, new_tokens=(1,) * 10, new_blocks=(0, 1, 2), state=5, saves=(StateSave(8, 2), StateSave(10, 7))
    )
    plan = StepPlan(9, [row, PlanRow(4, 0, 1, new_tokens=(2,), new_blocks=(3,), state=0)])
    plan.state_copies = [StateCopy(1, 5)]
    assert decode_plan(encode_plan(plan)) == plan


def test_the_scripted_executor_refuses_a_wrong_state() -> None:
    states = FakeStates(3)
    states.run(PlanRow(1, 0, 3, state=0, saves=(StateSave(2, 1),)), [11, 22, 33])
    states.run(PlanRow(1, 2, 1, state=1), [11, 22, 33])
    states.copy([StateCopy(0, 2), StateCopy(1, 0)])
    states.run(PlanRow(2, 3, 1, state=2), [11, 22, 33, 44])
    with pytest.raises(InternalError, match="continues at 2, but slot 2 holds another state"):
        states.run(PlanRow(2, 2, 1, state=2), [11, 22, 33])
    with pytest.raises(InternalError, match="outside of its tokens"):
        states.run(PlanRow(1, 3, 1, state=0, saves=(StateSave(3, 1),)), [11, 22, 33, 44])


def test_a_program_that_rewinds_at_every_step_ends() -> None:
    lab = Lab(num_states=3)
    got = lab.run_one([1, 2, 3, 4, 5, 6], controller=always(Decision.splice(1, (2, 3))), max_tokens=30)
    assert got.first.tokens[-2:] == [2, 3]
