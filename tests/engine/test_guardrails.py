"""Tests of guardrails with any steering: no client ever gets forbidden text, including text that begins in the
prompt."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridle.engine.control.decision import Decision
from bridle.engine.guardrails import guardrails as guard_module
from bridle.engine.guardrails.guardrail_matcher import GuardrailMatcher
from bridle.engine.guardrails.guardrails import Guardrails, TextRule, compiled
from bridle.engine.guardrails.text_normalization import MAX_UNSEEN, CasefoldedStream, fold
from bridle.engine.interfaces import StoredValue
from bridle.outputs import FinishReason
from bridle.serving.policies import read_policies
from bridle.testing.text import PieceDecoder
from tests.engine.programs import RandomProgram
from tests.engine.random_labs import random_lab, random_request
from tests.engine.support import Lab, Output, Replay, make_request
from tests.fakes.controller_runtime import FakeController, Reply, View

PIECES: list[str | bytes] = [
    "a",
    "b",
    "A",
    "\u200b",
    "c",
    " ",
    "bA",
    "x.",
    "@",
    b"\xc3",
    b"\xa9",
    "ab@",
    "",
    "!",
    "B",
    "é",
]
#: The same, with other characters that nobody sees, and others that are seen as some of these.
SPELLED: list[str | bytes] = [
    "a",
    "b",
    "A",
    "\u200b",
    "c",
    "\u00ad",
    "bA",
    "x.",
    "@",
    b"\xef\xbc",
    b"\xa0",
    "ｂ",
    "",
    "\u034f",
    "B",
    "é",
]
MAIL = r"[ab.x]{1,6}@[abx]+(?:\.[abx]+)*"
PHRASE = TextRule("words", "aba", reading="folded")
NEVER = TextRule("never", "b@|é", "end")
REDACTED = TextRule("mail", MAIL, "replace", "c!", is_late=True, max_length=40)
ANYWAY = TextRule("case", "cc", "retry")
CUT = TextRule("word", r"\ba\b", is_late=True)
SEEN = replace(REDACTED, reading="seen")
GUARDS = [
    Guardrails((PHRASE,)),
    Guardrails((REDACTED,)),
    Guardrails((NEVER, PHRASE)),
    Guardrails((ANYWAY, REDACTED)),
    Guardrails((CUT,)),
]
SPELLED_GUARDS = [Guardrails((SEEN, REDACTED)), Guardrails((SEEN, PHRASE)), Guardrails((PHRASE,))]
SEED = st.integers(0, 1 << 40)


def folded(text: str) -> str:
    """Return the text without case, accents and invisible characters, computed independently of the engine."""
    return seen(text).lower().replace("é", "e")


def seen(text: str) -> str:
    """Return the text as a reader sees it, computed independently of the engine."""
    return re.sub("[\u200b\u00ad\u034f]", "", text).translate({0xFF42: "b", 0xFF20: "@"})


def says(guard: Guardrails, text: str, begin: int, *, is_over: bool) -> str | None:
    """Return the rule that a text breaks after position `begin`. An unfinished text may end in a possible match, which
    must not be sent yet, so such a rule always counts."""
    for rule in guard.texts:
        read = {"folded": folded, "seen": seen, "written": str}[rule.reading]
        whole, start = read(text), len(read(text[:begin]))
        pattern = rule.pattern if rule is not CUT or is_over else r"\ba\b(?=.)"
        matches = [m for at in range(len(whole)) if (m := re.compile(pattern).match(whole, at))]
        if any(m.end() > start for m in matches):
            return rule.policy
    return None


def check(lab: Lab, request_ids: dict[str, tuple[Guardrails, str]]) -> None:
    """Check that each client's text after each event has no forbidden part."""
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
    """The programs sample, force, splice, replace, roll back, fork, wait and stop, with stop strings, little memory and
    other requests."""
    attack(seed, kv)


@given(SEED)
def test_nor_in_other_spellings(seed: int) -> None:
    attack(seed, "paged", SPELLED, SPELLED_GUARDS)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(SEED, st.booleans())
def test_none_of_ten_thousand_programs_says_it(seed: int, is_spelled: bool) -> None:
    attack(seed, "paged", *((SPELLED, SPELLED_GUARDS) if is_spelled else (PIECES, GUARDS)))


def attack(seed: int, kv: str, pieces: list[str | bytes] = PIECES, guards: list[Guardrails] = GUARDS) -> None:
    random = Random(seed)
    lab = random_lab(random, kv, decoder=PieceDecoder(pieces))
    known = {}
    requests = []
    for _ in range(random.randint(1, 3)):
        is_steered = random.random() < 0.8  # what looks back is tried where no prompt is taken back
        guard = random.choice(guards[: -1 if is_steered else None])
        program = FakeController(RandomProgram(random.randrange(1 << 30), "sssmbfffffnkrxxt"))
        fields: dict[str, object] = {"guard": guard, "controller": program if is_steered else None}
        request = random_request(random, **fields)
        state = PieceDecoder(pieces).open((), skip_special_tokens=True)
        lead = "".join([state.push(token) for token in request.prompt])
        known[request.id] = (guard, "" if is_steered else lead)
        requests.append(request)
    lab.run(*requests)
    check(lab, known)


def run(*, guard: Guardrails, pieces: list[str], script: list[int] | None = None, **fields: object) -> Output:
    """Return the output of a model that writes certain tokens, as far as the guardrails allow."""
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
    """Return the output of a controller that forces a text letter by letter."""
    return run(guard=Guardrails(rules), pieces=LETTERS, script=spelled(text), **{"max_tokens": 200, **fields})


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
    rule = TextRule("words", fold("Top Sécret"), "replace", "#", reading="folded", is_late=True)
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
    guard = Guardrails((CARD,))
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
    stopped, failed = (
        make_request(guard=Guardrails((CARD,)), controller=FakeController(each)) for each in (stops, fails)
    )
    first, second = lab.run(stopped, failed)
    assert first.first.finished is not None and first.first.finished.stop == "pay [card] now"
    assert second.first.finished is not None and "policies forbid what it said" in str(second.first.finished.error)


def test_random_programs_do_say_it_where_nothing_holds_them() -> None:
    """The random programs are a real attack: without guardrails, some program breaks most rules."""
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
    text, raw = CasefoldedStream(), "".join(pieces)
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
    assert Guardrails((rule,)).clean("abc") == ""
    assert Guardrails((replace(rule, on_failure="skip"), PHRASE)).clean("abca") == "abca"


# -- other spellings -------------------------------------------------------------------------------------------

SECRETS = {
    "email": "ann@example.org",
    "card": "4111 1111 1111 1111",
    "key": "AKIAABCDEFGHIJKLMNOP",
    "words": "forbidden",
}
RULES = {
    **{
        name: read_policies({"policy": [{"name": name, "kind": "redact", "what": [name]}]})
        for name in list(SECRETS)[:3]
    },
    "words": read_policies(
        {
            "policy": [
                {"name": "w", "kind": "phrases", "phrases": ["forbidden"], "action": "replace", "replacement": "#"}
            ]
        }
    ),
}
REPLACEMENTS = {"email": "[e-mail]", "card": "[card]", "key": "[key]", "words": "#"}
#: A character that nobody sees; each of another kind.
UNSEEN = ["\u200b", "\u00ad", "\u034f", "\u200d", "\ufe0f", "\u3164", "\u2060", "\U000e0061", "\u180e", "\x01"]


ZERO = "\u200b"


def rules_of(name: str) -> Guardrails:
    (policy,) = RULES[name].policies
    return Guardrails(policy.made.texts)


def wide(text: str) -> str:
    """Return the text in full-width letters."""
    return "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in text)


def through(guard: Guardrails, text: str) -> tuple[str, list[str]]:
    """Return the output of a text that is forced character by character, and the client's text after each event."""
    prompt = ["(", ")", "(", ")"]  # of which no secret can be a part
    letters = [*prompt, *dict.fromkeys(text + "".join(REPLACEMENTS.values())), ""]
    lab = Lab(vocab_size=len(letters), decoder=PieceDecoder(letters), eos_token_ids=(len(letters) - 1,))
    script = tuple(letters.index(char, len(prompt)) for char in text)
    program = FakeController(lambda view: forced(view, script))
    lab.run(make_request(guard=guard, controller=program, max_tokens=4 * len(text) + 20))
    again, had = Replay(lab.events[0].request_id), []
    for event in lab.events:
        again.add(event)
        had.append(again.outputs[0].text if again.outputs else "")
    return had[-1], had


@pytest.mark.few(16)
@pytest.mark.parametrize("name", list(SECRETS))
@pytest.mark.parametrize("number", range(len(UNSEEN) + 2))
def test_a_secret_is_one_in_any_spelling(name: str, number: int) -> None:
    """The secret is found with invisible characters between its letters, in full-width letters, and with accents."""
    secret, guard = SECRETS[name], rules_of(name)
    if number < len(UNSEEN):
        spelled = UNSEEN[number].join(secret)
    else:
        spelled = wide(secret) if number == len(UNSEEN) else "\u0301".join(secret)
    text = f"so {spelled}, yes"
    left, had = through(guard, text)
    assert left == f"so {REPLACEMENTS[name]}, yes"
    assert all(each == text[: len(each)] or each.startswith(f"so {REPLACEMENTS[name]}"[: len(each)]) for each in had)
    assert not any(len(each) > 3 and each.startswith(text[:4]) for each in had)
    assert guard.clean(text) == left
    for at in (1, len(secret) // 2, len(secret) - 1):  # once is enough
        once = secret[:at] + UNSEEN[number % len(UNSEEN)] + secret[at:]
        assert guard.clean(f"so {once}, yes") == left


@pytest.mark.parametrize(
    ("text", "left"),
    [("send(mail='ann@example.org', 'bo@example.org')", "send(mail='[e-mail]', '[e-mail]')"),
     ("to == `ann@example.org` or **bo@example.org**", "to == `[e-mail]` or **[e-mail]**"),
     ("<A mail={ann@example.org}/>", "<A mail={[e-mail]}/>"),
     ("o'neil@example.org, list+ann=example.org@example.com", "[e-mail], [e-mail]")],
)  # fmt: skip
def test_an_address_ends_at_the_quotes_around_it(text: str, left: str) -> None:
    guard = rules_of("email")
    assert guard.clean(text) == through(guard, text)[0] == left


@pytest.mark.parametrize("name", list(SECRETS))
def test_more_that_nobody_sees_than_there_may_be_hides_nothing(name: str) -> None:
    secret, guard = SECRETS[name], rules_of(name)
    left = guard.clean(f"so {secret[:3]}{MAX_UNSEEN * 3 * ZERO}{secret[3:]}.")
    assert left.startswith(f"so {REPLACEMENTS[name]}")
    assert secret not in left.replace(ZERO, "")


@pytest.mark.parametrize("name", list(SECRETS))
def test_what_is_held_back_is_bounded(name: str) -> None:
    """A model that writes half of a phrase, and then endless invisible characters, still makes progress."""
    guard = rules_of(name)
    watch = GuardrailMatcher(guard, "")
    hits = [watch.push(piece) for piece in SECRETS[name][:4] + ZERO * 300]
    assert any(hits)
    most = next(count for count, hit in enumerate(hits) if hit is not None)
    assert most <= 4 + 2 * MAX_UNSEEN


@given(st.text(st.sampled_from("ab@.x4 \u200b\u00adａ＠\n1"), max_size=40), st.sampled_from(list(SECRETS)))
@example("1.aa@", "email")
def test_a_text_without_one_passes_as_it_is(text: str, name: str) -> None:
    """A text without a secret is unchanged byte for byte, including invisible characters. The remaining part of any
    text has no secret."""
    guard = rules_of(name)
    plain = unicodedata.normalize("NFKC", re.sub("[\u200b\u00ad]", "", text))
    found = any(compiled(rule.pattern).search(each) for rule in guard.texts for each in (text, plain))
    left = through(guard, text)[0] if text else ""
    if not found:
        assert left == text
    cleaned = unicodedata.normalize("NFKC", re.sub("[\u200b\u00ad]", "", left))
    if name != "card":
        assert not any(compiled(rule.pattern).search(cleaned) for rule in guard.texts)
