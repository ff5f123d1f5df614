"""What an operator demands of texts holds whatever steers an output: nothing that a client has at any moment, with the
end of the prompt before it, says what is forbidden."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.engine import guard as guard_module
from bridle.engine.decision import Decision
from bridle.engine.folding import FoldedText, fold
from bridle.engine.guard import Guard, TextRule
from bridle.engine.interfaces import StoredValue
from bridle.outputs import FinishReason
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
        state = PieceDecoder(PIECES).open((), skip_special_tokens=True)
        lead = "".join([state.push(token) for token in request.prompt])
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
    at = view.num_asks  # whatever became of what it said before
    return Reply(Decision.splice(0, script[at : at + 1]) if at < len(script) else Decision.stop())


# -- one at a time ---------------------------------------------------------------------------------------------

LETTERS = [*map(chr, range(32, 127)), "\u200b", "É", "\u00a0", ""]


def spelled(text: str) -> list[int]:
    return [LETTERS.index(char) for char in text]


def said(text: str, *rules: TextRule, **fields: object) -> Output:
    """What is left of a text that a controller forces, letter by letter."""
    return run(guard=Guard(rules), pieces=LETTERS, script=spelled(text), **{"max_tokens": 200, **fields})


CARD = TextRule("card", r"(?<!\d)\d(?:[ .-]?\d){12,18}", "replace", "[card]", is_late=True, check="card", max_length=64)


def test_a_card_is_one_by_its_check_digit() -> None:
    assert said("pay 4111 1111 1111 1111 now", CARD).text == "pay [card] now"
    assert said("pay 4111 1111 1111 1112 now", CARD).text == "pay 4111 1111 1111 1112 now"
    assert said("4111111111111111", CARD).text == "[card]"
    assert said("4111-1111-1111-1111 22.", CARD).text == "[card] 22."


@pytest.mark.parametrize("count", range(1, 30))
def test_where_a_text_ends_a_match_is_replaced_and_the_rest_stays(count: int) -> None:
    text = "ab: 4111111111111111, yes"
    output = said(text, CARD, max_tokens=count)
    assert "4111111111111111" not in output.text
    assert count < 20 or output.text.startswith("ab: [card]")
    assert len(output.tokens) == output.usage.completion_tokens


def test_other_ways_to_write_a_phrase_are_the_phrase() -> None:
    rule = TextRule("words", fold("Top Sécret"), "replace", "#", is_folded=True, is_late=True)
    for text in ("top secret", "TOP  SECRET", "t\u200bop\u00a0sÉcret", "Top\u00a0 Secret"):
        assert said(f"a {text}.", rule).text == "a #."
    assert said("a topsecret.", rule).text == "a topsecret."


def test_a_phrase_that_is_forced_ends_the_output_with_the_name_of_the_policy_alone() -> None:
    output = said("say forbidden things", TextRule("words", "forbidden"))
    assert output.text == "say " and output.finished is not None
    assert str(output.finished.error) == "policy words forbids what is forced at position 7"
    output = said("say forbidden things", TextRule("words", "forbidden", "end"))
    assert (output.text, output.reason) == ("say ", FinishReason.CONTROLLER)


def test_a_program_that_says_it_again_and_again_gets_nowhere() -> None:
    rule = TextRule("words", "no", "replace", "", is_late=True)
    output = said("no" * 40 + ".", rule)
    assert "no" not in output.text


def test_logs_and_variables_say_no_more_than_texts() -> None:
    def program(view: View) -> Reply:
        say = ["a 41111111", "11111111 b", "c"][min(view.num_asks, 2)]
        stored = (StoredValue("x", b"is 4111111111111111 ok"),)
        return Reply(Decision.sample() if view.num_asks < 3 else Decision.stop(), log=say, stored=stored)

    lab = Lab(vocab_size=len(LETTERS), decoder=PieceDecoder(LETTERS))
    guard = Guard((CARD,))
    (replay,) = lab.run(make_request(guard=guard, controller=FakeController(program), max_tokens=9))
    assert "1111111111111111" not in replay.first.logs.replace("a 4", "4") and "[card]" in replay.first.logs
    assert {value for _, value in replay.first.stored} == {b"is [card] ok"}


def test_reasons_and_errors_of_controllers_say_no_more_than_texts() -> None:
    said = "pay 4111111111111111 now"

    def stops(view: View) -> Reply:
        return Reply(Decision.stop(said))

    def fails(view: View) -> Reply:
        raise RuntimeError(said)

    lab = Lab(vocab_size=len(LETTERS), decoder=PieceDecoder(LETTERS))
    stopped, failed = (make_request(guard=Guard((CARD,)), controller=FakeController(each)) for each in (stops, fails))
    first, second = lab.run(stopped, failed)
    assert first.first.finished is not None and first.first.finished.stop == "pay [card] now"
    assert second.first.finished is not None and "policies forbid what it said" in str(second.first.finished.error)


def test_random_programs_do_say_it_where_nothing_holds_them() -> None:
    """The attack is one: most rules are broken by some program without a guard."""
    broken = set()
    for seed in range(25):
        random = Random(seed)
        lab = random_lab(random, "paged", decoder=PieceDecoder(PIECES))
        program = FakeController(RandomProgram(seed, "sssmbfffffnkrxxt"))
        (replay,) = lab.run(random_request(random, controller=program))
        for guard in GUARDS:
            for output in replay.outputs.values():
                broken.add(says(guard, output.text, 0, is_over=True))
    assert broken >= {"words", "never", "mail"}


@given(st.lists(st.sampled_from(["a", "É", " ", "  ", "\u200b", "ﬁ", "x y", "\u0301"])))
def test_each_place_of_a_folded_text_is_one_of_the_text(pieces: list[str]) -> None:
    text, raw = FoldedText(), "".join(pieces)
    for piece in pieces:
        text.push(piece)
    assert text.whole() == fold(raw)
    places = [text.raw(at) for at in range(text.num_chars)]
    assert places == sorted(places)
    assert all(each in fold(raw[at]) for at, each in zip(places, fold(raw), strict=True))
    for _ in pieces:
        text.rewind(1)
    assert text.whole() == ""


def test_what_a_rule_cannot_decide_ends_the_output_or_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setitem(guard_module.CHECKS, "slow", fail)  # type: ignore[arg-type]
    rule = TextRule("slow", "b", check="slow")
    output = said("abc", rule)
    assert output.finished is not None and str(output.finished.error) == "policy slow failed" and output.text == "a"
    assert said("abc", replace(rule, on_failure="skip")).text == "abc"
    assert Guard((rule,)).clean("abc") == ""
    assert Guard((replace(rule, on_failure="skip"), PHRASE)).clean("abca") == "abca"
