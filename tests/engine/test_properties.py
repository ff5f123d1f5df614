"""The engine's properties: an output depends on its request alone, and on every byte of it.

Random requests with random programs, on both ways of keeping KV and on devices that answer at once and late, with
small pools, small budgets, late controllers and neighbors that come, go and fail: each must give exactly what the naive
oracle computes from the token list.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.request import Request
from bridle.errors import BridleError, ShardUnavailable
from bridle.outputs import FinishReason
from bridle.testing.async_executor import LateScriptedExecutor
from bridle.testing.text import PieceDecoder
from tests.engine.programs import VOCAB, RandomProgram
from tests.engine.support import Lab, Replay, check_against_reference, make_request, more, replay
from tests.fakes.controller_runtime import FakeController


class LateLab(Lab):
    """A lab whose device answers late."""

    Scripted = LateScriptedExecutor

    @property
    def device(self) -> LateScriptedExecutor:
        assert isinstance(self.executor, LateScriptedExecutor)
        return self.executor


SEED = st.integers(0, 1 << 40)
KEEPINGS = pytest.mark.parametrize("kv", ["paged", "sequences"])
#: Devices that answer at once, and late: steps are then launched before the tokens of the one before are there.
LABS = pytest.mark.parametrize("kind", [Lab, LateLab], ids=["at once", "late"])
# Pieces of several characters, of parts of characters, and none.
PIECES = ["a", "b", "ab", "ba", " ", "", b"\xc3", b"\xa9", "ccc", "d", "e", "abc", b"\xe2\x82", b"\xac", "x", "."]
ON_TIME = (0.0,)
LATE = (0.0, 0.01, 0.03, 0.2)


def random_request(random: Random, delays: tuple[float, ...] = ON_TIME, **fields: object) -> Request:
    """A request with a prompt that others are likely to share, and most parameters off their defaults
    sometimes."""
    prompt = [(i * 7) % 5 for i in range(random.randint(1, 14))] + [random.randrange(VOCAB)]
    controller = None
    if random.random() < 0.7:
        controller = FakeController(RandomProgram(random.randrange(1 << 30), delays=delays))
    chosen: dict[str, object] = {
        "controller": controller,
        "adapter": random.choice([None, None, None, "a"]),
        "tenant": random.choice(["", "", "t"]),
        "priority": random.choice([0, 0, -1]),
        "n": random.choice([1, 1, 1, 2, 3]),
        "max_tokens": random.choice([1, 4, 9, 14]),
        "min_tokens": random.choice([0, 0, 1]),
        "temperature": random.choice([0.0, 1.0, 1.0]),
        "top_p": random.choice([1.0, 0.8]),
        "top_k": random.choice([0, 5]),
        "min_p": random.choice([0.0, 0.05]),
        "typical_p": random.choice([1.0, 1.0, 0.9]),
        "repetition_penalty": random.choice([1.0, 1.0, 1.5]),
        "presence_penalty": random.choice([0.0, 0.0, 0.5]),
        "frequency_penalty": random.choice([0.0, 0.0, 0.7]),
        "logit_bias": random.choice([{}, {3: 2.0}]),
        "top_n_sigma": random.choice([0.0, 0.0, 1.5]),
        "xtc_probability": random.choice([0.0, 0.0, 0.5]),
        "dynatemp_range": random.choice([0.0, 0.0, 0.5]),
        "mirostat": random.choice([0, 0, 0, 2]),
        "mirostat_tau": random.choice([1.0, 2.0]),
        "dry_multiplier": random.choice([0.0, 0.0, 3.0]),
        "dry_allowed_length": random.choice([1, 2]),
        "dry_breaker_ids": random.choice([(), (2,)]),
        "allowed_token_ids": random.choice([(), (), (0, 1, 2, 4, 5, 7)]),
        "bad_words_ids": random.choice([(), (), ((5,), (1, 4))]),
        "seed": random.choice([0, 1, None, 12345]),
        "stop": random.choice([(), (), ("abc",), ("ca", "d e", "é")]),
        "include_stop_str_in_output": random.choice([False, True]),
        "stop_token_ids": random.choice([(), (11,)]),
        "ignore_eos": random.choice([False, True]),
        "logprobs": random.choice([None, None, 0, 2]),
        "logprobs_mode": random.choice(["raw", "processed"]),
        "prompt_logprobs": random.choice([None, None, None, 1]),
        "speculate": random.choice([None, 0, -1, 1, 5]),
        "trace": len(prompt) % 3 > 0,
    }
    return make_request(prompt, **{**chosen, **fields})


#: Verbs of programs that mostly draw, so that many steps are launched ahead, and some of these in vain.
MOSTLY_DRAWS = "s" * 24 + "mmmbnnffkrxtw"


def calm_request(random: Random, delays: tuple[float, ...] = ON_TIME) -> Request:
    """A request without drafts and scores, which would make steps wait, and longer than others."""
    controller = None
    if random.random() < 0.6:
        controller = FakeController(RandomProgram(random.randrange(1 << 30), MOSTLY_DRAWS, delays))
    return random_request(
        random,
        controller=controller,
        max_tokens=random.choice([4, 14, 18]),
        speculate=random.choice([None, 0]),
        logprobs=random.choice([None, None, 2]),
        prompt_logprobs=None,
        trace=random.random() < 0.3,
    )


def maker(random: Random, kind: type[Lab]) -> Callable[..., Request]:
    """What makes requests: for a device that answers late also calm ones."""
    return random.choice([calm_request, random_request]) if kind is LateLab else random_request


def random_lab(random: Random, kv: object, make: Callable[..., Lab] = Lab, **options: object) -> Lab:
    """An engine that is sometimes ample, sometimes cramped in one respect or another."""
    chosen: dict[str, object] = {
        "kv": kv,
        "vocab_size": VOCAB,
        "num_blocks": random.choice([9, 14, 30, 90]),
        "block_size": 4,
        "eos_token_ids": (13,),
        "decoder": PieceDecoder(PIECES),
        "device_time": lambda plan: 0.01,
        "max_num_batched_tokens": random.choice([1, 3, 8, 40]),
        "max_num_seqs": random.choice([1, 2, 5, 50]),
        "enable_prefix_caching": random.random() < 0.8,
        "max_forks": 100_000,
    }
    return make(**{**chosen, **options})


def run_staggered(lab: Lab, requests: list[Request], random: Random) -> dict[str, Replay]:
    """Requests arrive while others run."""
    arriving = list(requests)
    while arriving:
        if random.random() < 0.4:
            lab.engine.add(arriving.pop(0))
        lab.step()
    return lab.drain()


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


def essence(replays: dict[str, Replay], requests: list[Request]) -> list[object]:
    """What clients see, without what caching may change."""
    return [
        sorted(
            (one.path, tuple(one.tokens), one.text, one.reason, tuple(one.logprobs))
            for one in replays[request.id].outputs.values()
        )
        for request in requests
    ]


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
