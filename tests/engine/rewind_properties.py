"""Properties of rollbacks with forced tokens: the result equals a sequence that always had these tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bridle.engine.control.decision import Branch, Decision, Splice
from bridle.errors import ControllerError
from bridle.outputs import FinishReason, Rewind, TokenEvent
from bridle.testing.text import PieceDecoder, PieceState
from tests.engine.programs import always, script
from tests.engine.support import Lab, check_against_reference, make_request
from tests.fakes.controller_runtime import View

KEEPINGS = pytest.mark.parametrize("kv", ["paged", "sequences"])


def at(num_tokens: int, decision: Decision) -> object:
    """Return a program that returns `decision` when the sequence first has that number of tokens, and otherwise samples
    without steering."""
    done: set[tuple[object, ...]] = set()

    def program(view: View) -> Decision:
        if len(view.tokens) == num_tokens and view.path not in done:
            done.add(view.path)
            return decision
        return Decision.sample()

    return program


@KEEPINGS
@pytest.mark.parametrize("backtrack", range(1, 11))
def test_rewind_then_continue_is_a_fresh_run_of_what_is_kept(kv: str, backtrack: int) -> None:
    prompt, lab = [3, 1, 4, 1, 5], Lab(kv=kv)
    controller = at(11, Decision.splice(backtrack, (2, 7)))
    got = lab.run_one(prompt, controller=controller, temperature=0.0, max_tokens=12)
    plain = Lab(kv=kv).run_one(prompt, temperature=0.0, max_tokens=6)
    kept = [*(prompt + plain.first.tokens)[: 11 - backtrack], 2, 7]
    fresh = Lab(kv=kv).run_one(kept, temperature=0.0, max_tokens=17 - len(kept))
    expected = kept + fresh.first.tokens
    num_prompt = min(5, 11 - backtrack)
    assert got.first.tokens == expected[num_prompt:]
    assert got.first.usage.rewound_tokens == min(backtrack, 6)
    assert got.first.usage.prompt_tokens == 5


@KEEPINGS
def test_the_whole_sequence_can_be_replaced(kv: str) -> None:
    lab = Lab(kv=kv)
    got = lab.run_one((1, 2, 3), controller=script(Decision.splice(3, (9,))), temperature=0.0, max_tokens=4)
    fresh = Lab(kv=kv).run_one((9,), temperature=0.0, max_tokens=6)
    assert got.first.tokens == [9, *fresh.first.tokens]


def test_a_rewind_alone_draws_again_with_a_new_number() -> None:
    """After a rollback, the same position has the same distribution, but the next random number. The same token is not
    simply sampled again."""
    lab = Lab()
    seen = []
    for seed in range(40):
        program = script(Decision.sample(), Decision.splice(1), Decision.sample())
        lab.events.clear()
        request = make_request((1, 2, 3), controller=program, seed=seed, max_tokens=2, temperature=3.0)
        (got,) = lab.run(request)
        check_against_reference(lab, request, got)
        tokens = [event.token for event in lab.events if isinstance(event, TokenEvent)]
        seen.append(tokens[0] == tokens[1])
    assert not all(seen)


@KEEPINGS
def test_splices_wait_for_their_token(kv: str) -> None:
    """The first splice for the sampled token applies, and that token counts as rolled back if the splice removes it."""
    cycle = {1: 2, 2: 3, 3: 4, 4: 1}
    splices = (
        Splice(1, (8, 9, 1), frozenset({4})),
        Splice(0, (1,), frozenset({9})),
        Splice(0, (3,), frozenset({2, 4})),
    )
    lab = Lab(kv=kv, next_token=lambda prefix: cycle[prefix[-1]])
    request = make_request((4,), controller=always(Decision.sample(splices=splices)), max_tokens=9)
    (got,) = lab.run(request)
    assert got.first.tokens == [1, 2, 3, 8, 9, 1, 2, 3, 8]
    assert got.first.forced == [False, False, True, True, True, True, False, True, True]
    usage = got.first.usage
    assert (usage.sampled_tokens, usage.forced_tokens, usage.rewound_tokens) == (5, 6, 2)
    check_against_reference(lab, request, got)


def test_forced_tokens_take_no_logits_row_of_their_own() -> None:
    lab = Lab(record=True)
    lab.run_one((1, 2, 3), controller=script(Decision.splice(0, range(4, 20))), max_tokens=17)
    assert [plan.num_tokens for plan in lab.executor.plans if plan.rows] == [19]
    assert sum(len(batch.rows) for batch in lab.executor.batches) == 1


def test_forced_tokens_ride_with_the_draws_of_others() -> None:
    lab = Lab(record=True)
    forcing = make_request((1, 2), controller=script(Decision.sample(), Decision.splice(0, (5,) * 6)), max_tokens=8)
    plain = make_request((3, 4), max_tokens=8)
    lab.run(forcing, plain)
    rows = [{row.seq_id: row.num_scheduled for row in plan.rows} for plan in lab.executor.plans]
    assert rows[1] == {0: 7, 1: 1}


def test_text_of_a_rewind_is_taken_back() -> None:
    decoder = PieceDecoder(["a", "b", "ccc", b"\xc3", b"\xa9"])
    lab = Lab(vocab_size=5, decoder=decoder, next_token=lambda prefix: len(prefix) % 3)
    program = script(Decision.sample(), Decision.sample(), Decision.splice(2, (3, 4, 2)))
    got = lab.run_one((0, 0), controller=program, max_tokens=4)
    assert got.first.tokens == [3, 4, 2, 2]
    assert got.first.text == "écccccc"
    rewinds = [event for event in lab.events if isinstance(event, Rewind)]
    assert [(event.num_tokens, event.num_chars) for event in rewinds] == [(2, 4)]


class AfterPrompt(PieceDecoder):
    """A decoder that records the length of its prompt."""

    def open(self, prompt: Sequence[int], skip_special_tokens: bool) -> PieceState:
        return PieceState(tuple(b"%d%s " % (len(prompt), piece) for piece in self.pieces))


def test_text_after_a_rewind_into_the_prompt_follows_the_shorter_prompt() -> None:
    lab = Lab(vocab_size=5, decoder=AfterPrompt("abcde"), next_token=lambda prefix: len(prefix) % 3)
    program = script(Decision.sample(), Decision.splice(3, (4,)))
    request = make_request((0, 0, 0, 0), controller=program, max_tokens=2)
    (got,) = lab.run(request)
    assert got.first.text == "2e 2a 2b 2c "
    check_against_reference(lab, request, got)


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision.splice(4), "removes 4 tokens and appends 0; the sequence has 3"),
        (Decision.splice(3), "removes 3 tokens and appends 0; the sequence has 3 tokens and must keep at least one"),
        (Decision.splice(-1, (1,)), "backtrack is -1"),
        (Decision.splice(0, (32,)), "ff_tokens has token 32; the vocabulary has 32"),
        (Decision.splice(0, (-1,)), "ff_tokens has token -1"),
        (Decision.sample(splices=[Splice(5, (1,))]), "removes 4 tokens"),
        (Decision.sample(b"\1"), "the mask has 1 bytes; a vocabulary of 32 tokens needs 4"),
        (Decision.sample(bytes(4)), "the mask allows no token"),
        (Decision.sample(bias=[(32, 1.0)]), "bias has token 32"),
        (Decision.sample(bias=[(1, float("inf"))]), "the bias of token 1 is inf"),
        (Decision.sample(bias=[(1, float("nan"))]), "the bias of token 1 is nan"),
        (Decision.fork([Branch(sample=False, splices=(Splice(0, (1,)),) * 2)]), "needs exactly one splice"),
        (
            Decision.fork([Branch(sample=False, splices=(Splice(0, (1,), frozenset({1})),))]),
            "without when_sampled",
        ),
        (Decision.splice(0, ("x",)), "malformed"),  # type: ignore[arg-type]
    ],
)
def test_what_breaks_the_rules_ends_its_own_request_only(decision: Decision, message: str) -> None:
    lab = Lab()
    bystander = make_request((4, 5), max_tokens=5)
    got, other = lab.run(make_request((1, 2, 3), controller=script(decision)), bystander)
    check_against_reference(lab, bystander, other)
    assert got.first.reason is FinishReason.ERROR
    assert got.first.finished is not None
    assert isinstance(got.first.finished.error, ControllerError)
    assert message in str(got.first.finished.error)


@pytest.mark.parametrize(
    "decision",
    [
        Decision.sample(splices=[Splice(1)]),  # draws and drops
        Decision.sample(splices=[Splice(2, (5,))]),  # draws, and puts the same length back
        Decision.splice(1, (5,)),  # never draws
        Decision.splice(2, (5, 6)),
    ],
)
def test_turning_in_circles_is_bounded(decision: Decision) -> None:
    lab = Lab(max_draws_factor=2)
    bystander = make_request((4, 5), max_tokens=30)
    got, other = lab.run(make_request((1, 2, 3), controller=always(decision), max_tokens=30), bystander)
    check_against_reference(lab, bystander, other)
    assert got.first.finished is not None
    assert isinstance(got.first.finished.error, ControllerError)
    assert "which is the limit" in str(got.first.finished.error)
    usage = got.first.usage
    assert usage.sampled_tokens + usage.forced_tokens < 2_000
