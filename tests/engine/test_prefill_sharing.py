"""Tests of prompts that share a step: short prompts finish soon, long prompts continue, and outputs do not change."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.multimodal.multimodal_inputs import PlaceholderRange
from bridle.engine.request import Request
from bridle.engine.scheduling.prefill_sharing import MAX_PASSES
from bridle.engine.sequence_state import SequenceStatus
from bridle.outputs import PromptEvent, TokenEvent
from tests.engine.media_lab import PAD, FakeMediaStore, MediaLab, make_medium
from tests.engine.scheduler_loop import ample_loop
from tests.engine.support import Lab, check_against_reference, make_request, more

SEED = st.integers(0, 1 << 40)


def random_prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(8) for _ in range(length)]


def ample_lab(**options: object) -> Lab:
    """Return a lab with much memory, so that only the token budget of a step delays a prompt."""
    return Lab(**{"num_blocks": 20_000, "block_size": 4, "max_model_len": 4_000, "record": True} | options)


def steps_to_first_token(lab: Lab, request: Request, max_steps: int = 200) -> int:
    """Return the number of steps until the first token of a request added now."""
    lab.engine.add(request)
    for number in range(1, max_steps):
        if any(isinstance(event, TokenEvent) and event.request_id == request.id for event in lab.step()):
            return number
    raise AssertionError(f"no token in {max_steps} steps")


def test_blocks_of_a_tenant_count_once() -> None:
    """Two requests of one tenant share the blocks of their prompt. Another tenant has its own blocks."""
    lab = ample_lab(max_batch_prefill_tokens=100)
    prompt = random_prompt(Random(1), 8)
    for tenant in ("ann", "ann", "bob"):
        lab.engine.add(make_request([*prompt, 1], max_tokens=9, tenant=tenant))
        lab.step()
        lab.step()
    now = lab.engine.statistics()
    assert set(now.tenant_blocks) == {"ann", "bob"} and now.tenant_blocks["bob"] >= 3
    assert now.tenant_blocks.total() == now.num_blocks - now.num_free_blocks
    lab.drain()
    assert not lab.engine.statistics().tenant_blocks


@given(SEED)
def test_a_short_prompt_has_its_first_token_within_three_steps(seed: int) -> None:
    """The prompt's 20 tokens fit into half of a step, whatever number of much longer prompts run."""
    random = Random(seed)
    budget = random.randint(40, 100)
    lab = ample_lab(max_batch_prefill_tokens=budget)
    for _ in range(random.choice([1, 2, 8, 100])):
        lab.engine.add(make_request(random_prompt(random, random.randint(200, 1_000)), max_tokens=2))
    for _ in range(random.randint(0, 5)):
        lab.step()
    assert steps_to_first_token(lab, make_request(random_prompt(random, 20), max_tokens=1)) <= 3


def test_a_prompt_of_which_most_is_cached_counts_as_short() -> None:
    lab = ample_lab(max_batch_prefill_tokens=16)
    known = random_prompt(Random(1), 200)
    lab.run(make_request(known, max_tokens=1))
    lab.engine.add(make_request(random_prompt(Random(2), 1_000), max_tokens=1))
    lab.step()
    assert steps_to_first_token(lab, make_request([*known, 1, 2, 3], max_tokens=1)) <= 2


def test_many_short_prompts_share_the_steps_in_order() -> None:
    """64 prompts of 20 tokens run next to a long prompt, and get half of each step until they are done."""
    lab, random = ample_lab(max_batch_prefill_tokens=256), Random(1)
    lab.engine.add(make_request(random_prompt(random, 4_000 - 1), max_tokens=1))
    lab.step()
    shorts = [make_request(random_prompt(random, 20), max_tokens=1) for _ in range(64)]
    for request in shorts:
        lab.engine.add(request)
    done = [event.request_id for _ in range(10) for event in lab.step() if isinstance(event, TokenEvent)]
    assert done == [request.id for request in shorts]


@given(SEED)
def test_the_first_prompt_keeps_half_of_every_step(seed: int) -> None:
    """The first prompt gets at least half of each step until it is done, whatever number of short prompts arrive."""
    random = Random(seed)
    budget = random.randint(2, 40)
    loop = ample_loop(random, max_batch_prefill_tokens=budget)
    first = loop.add(random_prompt(random, 300), 301)
    while first in loop.live:
        for _ in range(random.randint(0, 6)):
            length = random.randint(1, 60)
            loop.add(random_prompt(random, length), length + random.randint(1, 3))
        left = len(first.tokens) - first.kv.num_computed
        (row,) = [row for row in loop.step().rows if row.seq_id == first.id]
        assert row.num_scheduled >= min(left, budget - budget // 2)


@given(SEED)
def test_no_token_of_a_step_is_wasted(seed: int) -> None:
    """While prompts are left, each step computes as many of their tokens as its budget allows."""
    random = Random(seed)
    budget = random.randint(2, 40)
    loop = ample_loop(random, max_batch_prefill_tokens=budget)
    for _ in range(12):
        length = random.randint(1, 80)
        loop.add(random_prompt(random, length), length + 1)
    while loop.live:
        left = sum(len(seq.tokens) - seq.kv.num_computed for seq in loop.live)
        assert sum(row.num_scheduled for row in loop.step().rows) == min(budget, left)


@more(2)
@given(SEED)
def test_nothing_but_time_depends_on_the_shares(seed: int) -> None:
    """With little memory and any budget, each output equals that of its request alone, and no request waits forever."""
    random = Random(seed)
    lab = Lab(
        num_blocks=random.randint(20, 60),
        block_size=random.choice([1, 4]),
        max_model_len=20,
        max_batch_prefill_tokens=random.randint(1, 12),
        max_num_seqs=random.choice([2, 5, 50]),
        kv=random.choice(["paged", "sequences"]),
    )
    common = random_prompt(random, 8)
    requests = []
    for _ in range(12):
        prompt = random.choice([[], common]) + random_prompt(random, random.randint(1, 8))
        fields = {"max_tokens": random.randint(1, 4), "priority": random.randint(0, 1), "place": random.random()}
        requests.append(make_request(prompt, seed=random.randrange(9), temperature=1.0, **fields))
    left = list(requests)
    while left:
        lab.engine.add(left.pop())
        lab.step()
        if random.random() < 0.2:
            lab.engine.cancel(random.choice(requests).id)
    replays = lab.drain()
    for request in requests:
        if replays[request.id].first.reason.value != "cancelled":
            check_against_reference(lab, request, replays[request.id])


# -- room in the KV cache ------------------------------------------------------------------------------------------


def test_prompts_that_have_begun_take_no_room_from_each_other() -> None:
    """The KV cache holds one and a half of two long prompts, so the second begins when the first is done."""
    lab = Lab(num_blocks=60, block_size=4, max_batch_prefill_tokens=16)
    requests = [
        make_request(random_prompt(Random(seed), length), max_tokens=1) for seed, length in ((1, 160), (2, 120))
    ]
    lab.run(*requests)
    assert lab.engine.statistics().num_preemptions == 0
    assert lab.executor.num_computed_tokens == 280


def test_a_short_prompt_passes_one_that_waits_for_room_but_not_for_ever() -> None:
    loop = ample_loop(Random(1), max_batch_prefill_tokens=16)
    loop.add([1] * 800, 1_000)  # holds half of the blocks until it is finished
    while loop.live[0].kv.is_prefilling or loop.live[0].queue.status is SequenceStatus.WAITING:
        loop.step()
    blocked = loop.add([2] * 900, 901)
    num_passes = 0
    for number in range(MAX_PASSES + 10):
        short = loop.add([3, number % 8, number // 8 % 8, number // 64], 5)
        loop.step()
        num_passes += short not in loop.live
    assert num_passes == MAX_PASSES
    assert blocked.queue.status is SequenceStatus.WAITING
    loop.finish(loop.live[0])
    while loop.live:
        loop.step()
    assert blocked.is_finished


def test_a_short_prompt_of_a_lower_level_takes_no_room_from_a_higher_one() -> None:
    loop = ample_loop(Random(1), max_batch_prefill_tokens=16)
    loop.add([1] * 800, 1_000)
    for _ in range(60):
        loop.step()
    loop.add([2] * 900, 901)
    short = loop.add([3] * 4, 5, priority=1)
    loop.step()
    assert short in loop.live


# -- common beginnings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_steps", "budget"), [(0, 16), (1, 16), (3, 16), (0, 512)])
def test_a_common_beginning_is_computed_once(num_steps: int, budget: int) -> None:
    """Requests wait while another request computes their common beginning, and then find it cached."""
    lab = ample_lab(max_batch_prefill_tokens=budget)
    common = random_prompt(Random(1), 80)
    lab.engine.add(make_request([*common, *random_prompt(Random(2), 40)], max_tokens=1))
    for _ in range(num_steps):
        lab.step()
    later = [make_request([*common, 1, number], max_tokens=1) for number in range(5)]
    for request in later:
        lab.engine.add(request)
    replays = lab.drain()
    assert lab.executor.num_computed_tokens == 80 + 40 + 5 * 2
    assert [replays[request.id].first.usage.cached_tokens for request in later] == [80] * 5


def test_who_waits_for_a_common_beginning_speeds_up_its_provider() -> None:
    """The long prompt with the common beginning gets the turn of the short prompt, ahead of a longer prompt that came
    first."""
    lab = ample_lab(max_batch_prefill_tokens=16)
    common = random_prompt(Random(1), 40)
    lab.engine.add(make_request(random_prompt(Random(3), 900), max_tokens=1))
    lab.engine.add(make_request([*common, *random_prompt(Random(2), 3_000)], max_tokens=1))
    for _ in range(4):
        lab.step()
    assert steps_to_first_token(lab, make_request([*common, 1, 2], max_tokens=1)) <= 40 // 8 + 1


def test_a_provider_that_is_cancelled_is_not_waited_for() -> None:
    lab = ample_lab(max_batch_prefill_tokens=16)
    common = random_prompt(Random(1), 80)
    provider = make_request([*common, *random_prompt(Random(2), 400)], max_tokens=1)
    follower = make_request([*common, 1, 2], max_tokens=1)
    lab.engine.add(provider)
    lab.step()
    lab.engine.add(follower)
    lab.step()
    lab.engine.cancel(provider.id)
    replays = lab.drain()
    check_against_reference(lab, follower, replays[follower.id])
    assert replays[follower.id].first.usage.cached_tokens == 32


# -- pictures ------------------------------------------------------------------------------------------------------


def test_a_picture_that_fills_a_step_is_not_kept_out_by_short_prompts() -> None:
    """The image cannot be split, and half of a step is too small for it."""
    lab = MediaLab(FakeMediaStore(), num_blocks=2_000, max_batch_prefill_tokens=16)
    medium = make_medium("x", 15)
    runs = (PlaceholderRange(1, 15, medium.key, is_mutual=True),)
    seeing = make_request([1, *[PAD] * 15, 2], runs=runs, media=(medium,), max_tokens=1)
    lab.engine.add(make_request([1] * 200, max_tokens=1))
    lab.step()
    lab.engine.add(seeing)
    for number in range(60):
        lab.engine.add(make_request([2, number % 8, number // 8, 3, 4, 5], max_tokens=1))
        lab.step()
    assert seeing.id not in lab.engine.request_ids
    lab.drain()


# -- levels and users ----------------------------------------------------------------------------------------------


def test_a_more_urgent_level_comes_first_however_long() -> None:
    lab = ample_lab(max_batch_prefill_tokens=16)
    urgent = make_request(random_prompt(Random(1), 64), max_tokens=1)
    short = make_request(random_prompt(Random(2), 8), max_tokens=1, priority=1)
    replays_order = [event.request_id for event in _events(lab, urgent, short) if isinstance(event, PromptEvent)]
    assert replays_order == [urgent.id, short.id]


def test_prompts_of_about_the_same_size_take_turns_by_place() -> None:
    lab = ample_lab(max_batch_prefill_tokens=32)
    lab.engine.add(make_request(random_prompt(Random(1), 900), max_tokens=1))
    lab.step()
    crowd = [make_request(random_prompt(Random(n), 16), max_tokens=1, place=float(n)) for n in range(2, 10)]
    other = make_request(random_prompt(Random(20), 18), max_tokens=1, place=2.5)
    done = [event.request_id for event in _events(lab, *crowd, other) if isinstance(event, PromptEvent)]
    assert done.index(other.id) <= 1


def _events(lab: Lab, *requests: Request) -> Iterator[object]:
    for request in requests:
        lab.engine.add(request)
    while lab.engine.has_work:
        yield from lab.step()
