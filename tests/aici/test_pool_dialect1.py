"""Guests and runtimes of dialect 1 steer the engine: the phases of the dialect map to the engine's decisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool, WasmController
from bridle.engine.request import Request
from bridle.outputs import FinishReason, Forked
from bridle.sampling import SamplingParams
from tests.aici.conftest import EOS, VOCAB_SIZE
from tests.aici.guests import SHOW_ARGUMENT, TRAP, Step, by_branch, guest1, mask, result, say
from tests.aici.steering import Steered
from tests.waiting import PATIENCE, until

GO = [result({"suspend": False, "num_forks": 1, "ff_tokens": []})]
SUSPEND = [result({"suspend": True, "num_forks": 1, "ff_tokens": []})]
ON = [result({"stop": False})]
STOP = [result({"stop": True})]


def force(*tokens: int) -> Step:
    return [result({"suspend": False, "num_forks": 1, "ff_tokens": list(tokens)})]


def fork(count: int) -> Step:
    return [result({"suspend": False, "num_forks": count, "ff_tokens": []})]


def among(*tokens: int) -> Step:
    return [mask(tokens, VOCAB_SIZE, new=False), result({"SampleWithBias": {}})]


def splice(backtrack: int, *tokens: int) -> Step:
    return [result({"Splice": {"backtrack": backtrack, "ff_tokens": list(tokens)}})]


@pytest.fixture(scope="module", params=["semaphores", "futex"])
def pool(tokenizer: Path, store: Path, request: pytest.FixtureRequest) -> Iterator[RuntimePool]:
    limits = ("--wasm-max-step-time", "2000", "--wasm-max-pre-step-time", "2000", "--limit", "max_instances=6")
    args = ("--store", str(store), *limits)
    config = RuntimeConfig(str(tokenizer), dialect=1, extra_args=args, futex=request.param == "futex", json_size=8)
    pool = RuntimePool(config, VOCAB_SIZE)
    yield pool
    pool.shutdown()


@pytest.fixture
def steered(pool: RuntimePool) -> Iterator[Steered]:
    steered = Steered(pool)
    yield steered
    for number in range(6):  # as many as fit: whoever was here before has left nothing
        steered.add(f"probe {number}", guest1([GO], [among(65)], [STOP]))
    steered.run()
    assert [steered.tokens(f"probe {number}") for number in range(6)] == [[65]] * 6


def test_bias_rows_rule_and_post_stops(steered: Steered) -> None:
    steered.add("a", guest1([GO], [among(65), among(66, 67)], [[SHOW_ARGUMENT, *ON], STOP]))
    steered.run()
    first, second = steered.tokens("a")
    assert first == 65 and second in (66, 67)
    assert steered.end("a").reason is FinishReason.CONTROLLER
    assert '{"tokens":[65],"backtrack":0}' in steered.logs("a")


def test_forced_tokens_before_scheduling(steered: Steered) -> None:
    """The runtime has already passed the forced tokens to the post callback, so the engine does not send them again."""
    post = [[say("post "), SHOW_ARGUMENT, *ON]]
    pres = [force(70, 71), GO, GO, force(72), GO]
    steered.add("a", guest1(pres, [among(65), among(66)], [*post, *post, *post, STOP]))
    steered.run()
    assert steered.tokens("a")[:3] == [70, 71, 65]
    assert steered.logs("a").count('"tokens":[70,71]') == 1
    usage = steered.end("a").usage
    assert usage.forced_tokens == 3 and usage.sampled_tokens >= 1


def test_a_suspended_sequence_costs_no_forward(steered: Steered) -> None:
    steered.add("a", guest1([GO, *[SUSPEND] * 30, GO], [among(65), among(66)], [ON, STOP]))
    steered.run()
    assert steered.tokens("a") == [65, 66]
    assert steered.engine.statistics().num_computed_tokens <= 3 + 2 + 3


def test_forks_before_the_first_step_go_their_own_ways(steered: Steered) -> None:
    """One logits row and three bias rows give three outputs, which then continue independently."""
    mids = [by_branch(among(65), among(66), splice(0, 90, 91))], [by_branch(among(80), among(80), among(80))]
    steered.add("a", guest1([fork(3), GO], [*mids, among(82)], [ON, ON, STOP]))
    steered.run()
    assert sum(isinstance(event, Forked) for event in steered.events["a"]) == 2
    assert steered.tokens("a", 0)[0] == 65 and steered.tokens("a", 1)[0] == 66
    assert steered.tokens("a", 2)[:2] == [90, 91]


def test_a_fork_that_ends_before_its_first_ask(steered: Steered) -> None:
    steered.add("a", guest1([fork(2), GO], [[by_branch(among(65), among(66))]], [ON]), max_tokens=1)
    steered.run()
    assert [steered.end("a", index).reason for index in (0, 1)] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize(
    ("backtrack", "expected"), [(0, [65, 66, 70, 71, 80]), (1, [65, 70, 71, 80]), (2, [70, 71, 80])]
)
def test_a_splice_replaces_tokens(steered: Steered, backtrack: int, expected: list[int]) -> None:
    mids = [among(65), among(66), splice(backtrack, 70, 71), among(80)]
    steered.add("a", guest1([GO], mids, [ON, ON, [SHOW_ARGUMENT, *ON], STOP]))
    steered.run()
    assert steered.tokens("a") == expected
    assert f'{{"tokens":[70,71],"backtrack":{backtrack}}}' in steered.logs("a")


def test_stop_in_mid_leaves_only_the_end(steered: Steered) -> None:
    steered.add("a", guest1([GO], [among(65), [result('"Stop"')]], [ON]), ignore_eos=False)
    steered.run()
    assert steered.tokens("a") == [65, EOS] and steered.end("a").reason is FinishReason.STOP


def test_neighbours_and_long_prompts(steered: Steered) -> None:
    """The pre callback runs for all sequences if one needs it. It must not affect sequences with incomplete prompts."""
    counting = guest1([GO], [among(65), among(66), among(67), among(68)], [ON, ON, ON, STOP])
    forcing = guest1([GO, force(70, 71), GO], [among(65), among(66), among(67)], [ON, ON, ON, STOP])
    steered.add("long", counting, prompt=tuple(i % 200 for i in range(400)))
    for name in ("a", "b"):
        steered.add(name, counting)
    steered.add("c", forcing)
    steered.add("bad", guest1([GO], [among(65), [TRAP]], [ON]))
    steered.run()
    assert [steered.tokens(name) for name in ("long", "a", "b")] == [[65, 66, 67, 68]] * 3
    assert steered.tokens("c")[:3] == [65, 70, 71]
    assert steered.end("bad").reason is FinishReason.ERROR and "unreachable" in str(steered.end("bad").error)


def test_outputs_cannot_be_multiplied(steered: Steered) -> None:
    steered.add("a", guest1([GO], [among(65)], [STOP]), n=2, temperature=1.0)
    steered.run()
    assert "dialect 1" in str(steered.end("a").error)


def test_what_nobody_wants_goes_while_nobody_asks(steered: Steered) -> None:
    """The instance of a request that was cancelled before its start is freed, even if no other request calls the
    runtime."""
    controller = WasmController(steered.upload(guest1([GO], [among(65)], [STOP])), "")
    request = Request("alone", (1, 2, 3), SamplingParams(), controller=controller)
    steered.pool.open(request).result(PATIENCE)
    steered.pool.abandon(request)
    until(lambda: not steered.pool.collect((), None) and not steered.pool.is_busy, "an idle pool")


def test_cancelled_at_any_step(steered: Steered) -> None:
    """A cancelled request's instances are freed at any step. The fixture's check fails if instances are left."""
    wasm = guest1([GO, fork(2), GO], [among(65), [by_branch(among(66), among(67))], among(68)], [ON])
    for num_steps in range(8):
        name = f"r{num_steps}"
        steered.add(name, wasm)
        for _ in range(num_steps):
            steered.step()
        steered.engine.cancel(name)
        steered.run()
        assert steered.end(name).reason is FinishReason.CANCELLED
