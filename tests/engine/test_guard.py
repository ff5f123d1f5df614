"""What an operator demands of texts holds whatever steers an output: nothing that a client has at any moment, with the
end of the prompt before it, says what is forbidden."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.engine.decision import Decision
from bridle.engine.guard import Guard, TextRule
from bridle.testing.text import PieceDecoder
from lab.doubles.controllers import FakeController, Reply, View
from tests.engine.programs import RandomProgram
from tests.engine.support import Lab, Output, Replay, make_request
from tests.engine.test_laws import random_lab, random_request

PIECES = ["a", "b", "A", "\u200b", "c", " ", "bA", "x.", "@", b"\xc3", b"\xa9", "ab@", "", "!", "B", "é"]
MAIL = r"[ab.x]{1,6}@[abx]+(?:\.[abx]+)*"
PHRASE = TextRule("words", "aba", is_folded=True)
NEVER = TextRule("never", "b@|é", "end")
REDACTED = TextRule("mail", MAIL, "replace", "c!", is_late=True, max_length=40)
ANYWAY = TextRule("case", "cc", "retry")
CUT = TextRule("word", r"\ba\b", is_late=True)
GUARDS = [Guard((PHRASE,)), Guard((REDACTED,)), Guard((NEVER, PHRASE)), Guard((ANYWAY, REDACTED)), Guard((CUT,))]
SEED = st.integers(0, 1 << 40)


def folded(text: str) -> str:
    """The test's own reading of a text without case, accents and what nobody sees."""
    return text.replace("\u200b", "").lower().replace("é", "e")


def says(guard: Guard, text: str, begin: int, *, is_over: bool) -> str | None:
    """The rule that a text breaks behind `begin`. A text that goes on may end in what is decided by what follows, but
    that must not be told; so a late rule counts in any case."""
    for rule in guard.texts:
        whole, start = (folded(text), len(folded(text[:begin]))) if rule.is_folded else (text, begin)
        pattern = rule.pattern if rule is not CUT or is_over else r"\ba\b(?=.)"
        matches = [m for at in range(len(whole)) if (m := re.compile(pattern).match(whole, at))]
        if any(m.end() > start for m in matches):
            return rule.policy
    return None


def check(lab: Lab, request_ids: dict[str, tuple[Guard, str]]) -> None:
    """What each client has after each event."""
    again: dict[str, Replay] = {}
    for event in lab.events:
        if event.request_id not in request_ids:
            continue
        guard, lead = request_ids[event.request_id]
        replay = again.setdefault(event.request_id, Replay(event.request_id))
        replay.add(event)
        for output in replay.outputs.values():
            wrong = says(guard, lead + output.text, len(lead), is_over=output.finished is not None)
            assert wrong is None, (wrong, lead, output.text, output.finished)


@pytest.mark.parametrize("kv", ["paged", "sequences"])
@given(SEED)
def test_no_random_program_says_what_is_forbidden(kv: str, seed: int) -> None:
    """Programs that draw, force, splice, replace, rewind, fork, wait and stop, with stop strings, small memory and
    others beside them."""
    attack(seed, kv)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(SEED)
def test_none_of_ten_thousand_programs_says_it(seed: int) -> None:
    attack(seed, "paged")


def attack(seed: int, kv: str) -> None:
    random = Random(seed)
    lab = random_lab(random, kv, decoder=PieceDecoder(PIECES))
    known = {}
    requests = []
    for _ in range(random.randint(1, 3)):
        is_steered = random.random() < 0.8  # what looks back is tried where no prompt is taken back
        guard = random.choice(GUARDS[: -1 if is_steered else None])
        program = FakeController(RandomProgram(random.randrange(1 << 30), "sssmbfffffnkrxxt"))
        fields: dict[str, object] = {"guard": guard, "controller": program if is_steered else None}
        request = random_request(random, **fields)
        lead = PieceDecoder(PIECES).decode(request.prompt)
        known[request.id] = (guard, "" if is_steered else lead)
        requests.append(request)
    lab.run(*requests)
    check(lab, known)


def run(*, guard: Guard, pieces: list[str], script: list[int] | None = None, **fields: object) -> Output:
    """The output of a model that says certain tokens, as far as it is let."""
    lab = Lab(vocab_size=len(pieces), decoder=PieceDecoder(pieces), eos_token_ids=(len(pieces) - 1,))
    if script is not None:
        fields["controller"] = FakeController(lambda view: forced(view, tuple(script)))
    (replay,) = lab.run(make_request(guard=guard, **fields))
    return replay.first


def forced(view: View, script: tuple[int, ...]) -> Reply:
    done = len(view.tokens) - view.num_prompt
    return Reply(Decision.splice(0, script[done : done + 1]) if done < len(script) else Decision.stop())
