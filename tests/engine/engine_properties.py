"""Properties of the engine: an output depends only on its request, and on every byte of the request.

Requests and their programs are random. The requests run on both kinds of KV cache, and on devices that answer at once
or late. Block pools and budgets are small, controllers are late, and other requests come, end and fail. Each request
must return exactly the output that a naive reference computes from the token list.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given

from bridle.engine.request import Request
from bridle.errors import BridleError, ShardUnavailable
from bridle.outputs import FinishReason
from tests.engine.random_labs import (
    KEEPINGS,
    LABS,
    LATE,
    ON_TIME,
    SEED,
    essence,
    maker,
    random_lab,
    random_request,
    run_staggered,
)
from tests.engine.support import Lab, check_against_reference, more, replay


@LABS
@KEEPINGS
@more(3)
@given(seed=SEED)
def test_outputs_are_those_of_the_oracle(seed: int, kv: str, kind: type[Lab]) -> None:
    random = Random(seed)
    lab = random_lab(random, kv, kind)
    make = maker(random, kind)
    requests = [make(random) for _ in range(random.randint(1, 7))]
    replays = run_staggered(lab, requests, random)
    for request in requests:
        check_against_reference(lab, request, replays[request.id])


@LABS
@KEEPINGS
@more(2)
@given(seed=SEED)
def test_late_controllers_change_nothing_but_time(seed: int, kv: str, kind: type[Lab]) -> None:
    random = Random(seed)
    lab = random_lab(random, kv, kind)
    make = maker(random, kind)
    requests = [make(random, LATE) for _ in range(random.randint(1, 5))]
    replays = run_staggered(lab, requests, random)
    for request in requests:
        check_against_reference(lab, request, replays[request.id])


@LABS
@KEEPINGS
@given(seed=SEED)
def test_cancelled_neighbors_leave_no_trace(seed: int, kv: str, kind: type[Lab]) -> None:
    random = Random(seed)
    lab = random_lab(random, kv, kind)
    make = maker(random, kind)
    requests = [make(random, random.choice([ON_TIME, LATE])) for _ in range(random.randint(2, 7))]
    doomed = {request.id for request in requests if random.random() < 0.5}
    arriving, to_cancel = list(requests), sorted(doomed)
    while arriving or to_cancel:
        if arriving and random.random() < 0.5:
            lab.engine.add(arriving.pop(0))
        if to_cancel and random.random() < 0.3:
            lab.engine.cancel(to_cancel.pop())
        lab.step()
    replays = lab.drain()
    for request in requests:
        if request.id not in doomed:
            check_against_reference(lab, request, replays[request.id])
        elif request.id in replays:
            expected = lab.reference(request)
            for path, output in replays[request.id].by_path.items():
                assert output.reason is FinishReason.CANCELLED or output.tokens == expected[path].tokens


@LABS
@KEEPINGS
@more(2)
@given(seed=SEED)
def test_a_device_that_comes_and_goes_changes_nothing(seed: int, kv: str, kind: type[Lab]) -> None:
    random = Random(seed)
    losses = {number: ShardUnavailable("gone") for number in range(1, 200) if random.random() < 0.15}
    for number in list(losses):
        if number - 1 in losses and number - 2 in losses:
            del losses[number]  # three in a row end the requests
    lab = random_lab(random, kv, kind, **{random.choice(["faults", "sample_faults"]): losses})
    make = maker(random, kind)
    requests = [make(random, random.choice([ON_TIME, LATE])) for _ in range(random.randint(1, 5))]
    replays = run_staggered(lab, requests, random)
    for request in requests:
        check_against_reference(lab, request, replays[request.id])


@LABS
@KEEPINGS
@more(2)
@given(seed=SEED)
def test_a_failed_step_ends_at_most_the_request_it_is_pinned_on(seed: int, kv: str, kind: type[Lab]) -> None:
    random = Random(seed)
    faults = {number: BridleError("broken") for number in range(1, 100) if random.random() < 0.1}
    lab = random_lab(random, kv, kind, **{random.choice(["faults", "sample_faults"]): faults})
    make = maker(random, kind)
    requests = [make(random) for _ in range(random.randint(1, 5))]
    replays = run_staggered(lab, requests, random)
    for request in requests:
        outputs = replays[request.id].outputs.values()
        broken = [one for one in outputs if one.finished and str(one.finished.error) == "broken"]
        if not broken:
            check_against_reference(lab, request, replays[request.id])
        assert all(output.reason is FinishReason.ERROR for output in broken)


# -- the same, between engines: each knob alone ----------------------------------------------------------------


KNOBS: dict[str, dict[str, object]] = {
    "one token at a time": {"max_num_batched_tokens": 1},
    "odd chunks": {"max_num_batched_tokens": 5},
    "one sequence at a time": {"max_num_seqs": 1},
    "a pool that forces preemptions": {"num_blocks": 12},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of one": {"block_size": 1, "num_blocks": 400},
    "blocks of sixteen": {"block_size": 16, "num_blocks": 25},
    "KV by sequence": {"kv": "sequences"},
    "a little of each prompt": {"max_batch_prefill_tokens": 3},
    "whole prompts": {"chunked_prefill": False},
    "whole prompts, few at a time": {"chunked_prefill": False, "max_batch_prefill_tokens": 20},
    "prompts that wait for others": {"waiting_served_ratio": 2.0, "max_waiting_tokens": 3, "max_num_seqs": 5},
    "a small part of the pool": {"max_batch_total_tokens": 60},
    "short sequences": {"max_input_tokens": 16, "max_total_tokens": 32},
}


def plain_requests() -> list[Request]:
    return [random_request(Random(seed), id=f"r{seed}", adapter=None) for seed in range(40, 52)]


def run_with(requests: list[Request], **options: object) -> tuple[Lab, list[object]]:
    lab = random_lab(Random(0), **{**AMPLE, **options})
    lab.run(*requests)
    return lab, essence(replay(lab.events), requests)


AMPLE: dict[str, object] = {
    "kv": "paged",
    "num_blocks": 100,
    "max_num_batched_tokens": 1_000,
    "max_num_seqs": 100,
    "enable_prefix_caching": True,
}


@pytest.mark.parametrize("knob", KNOBS)
def test_no_knob_changes_an_output(knob: str) -> None:
    assert run_with(plain_requests(), **KNOBS[knob])[1] == run_with(plain_requests())[1]


def test_a_small_pool_preempts() -> None:
    lab, _ = run_with(plain_requests(), **KNOBS["a pool that forces preemptions"])
    assert lab.engine.statistics().num_preemptions > 0


def test_arrival_order_changes_no_output() -> None:
    backwards = run_with(plain_requests()[::-1])[1]
    assert backwards[::-1] == run_with(plain_requests())[1]


def test_neighbors_change_no_output() -> None:
    together = run_with(plain_requests())[1]
    assert [run_with([request])[1][0] for request in plain_requests()] == together


def test_a_second_run_from_the_cache_changes_no_output() -> None:
    lab = random_lab(Random(0), **AMPLE)
    prompt = tuple(range(12))
    first = lab.run_one(prompt, max_tokens=9, seed=5, n=2)
    again = lab.run_one(prompt, max_tokens=9, seed=5, n=2)
    assert again.first.usage.cached_tokens == 8
    assert first.first.usage.cached_tokens == 0
    assert {path: one.tokens for path, one in first.by_path.items()} == {
        path: one.tokens for path, one in again.by_path.items()
    }


def test_seeds_matter_and_forks_draw_their_own() -> None:
    lab = random_lab(Random(0), **AMPLE)
    a, b, c = (lab.run_one(max_tokens=20, ignore_eos=True, seed=seed, n=4) for seed in (1, 1, 2))
    texts = [[tuple(one.tokens) for one in run.outputs.values()] for run in (a, b, c)]
    assert texts[0] == texts[1]
    assert len({*texts[0], *texts[2]}) == 8
