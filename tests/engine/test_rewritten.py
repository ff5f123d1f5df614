"""Tests of policies that replace a part of a controlled output: the rest stays in order, and the controller sees the
client's text and positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridle.controllers.composition import compose
from bridle.engine.control.decision import Branch, Decision, Splice, mask_of
from bridle.engine.guardrails.guardrails import Guardrails, TextRule, compiled
from bridle.engine.interfaces import Ask
from bridle.outputs import FinishReason
from bridle.testing.text import PieceDecoder
from tests.engine.support import Lab, make_request
from tests.fakes.controller_runtime import FakeController, Reply, View

PIECES: list[str | bytes] = [
    *"abcABé. @<>#x",
    "ab",
    "ba",
    "a b",
    "b.",
    b"\xf0\x9f",
    b"\x8d\x8e",
    b"b\xf0\x9f",
    b"\x8d\x8ea",
    b"\xf0",
    b"\x9f",
    b"\x8d",
    b"\x8e",
    "\ufffd",
    "",
    "!",
    "end",
]
DECODER = PieceDecoder(PIECES)
SIZE, CLOSING, EOS = len(PIECES), PIECES.index("!"), PIECES.index("end")


def rule(pattern: str, replacement: str, reading: str = "written") -> TextRule:
    return TextRule("words", pattern, "replace", replacement, reading, is_late=True, max_length=40)  # type: ignore[arg-type]


#: Rules as policies of each kind make them: phrases, patterns, redaction, characters; one whose replacement is a match.
GUARDS = [
    Guardrails((rule("aba", "#"),)),
    Guardrails((rule("ab a", "<x>", "folded"),)),
    Guardrails((rule("a+b", "<>x#"),)),
    Guardrails((rule("abab?", ""),)),
    Guardrails((rule(r"[ab]+@[ab]+(?:\.[ab]+)*", "#", "seen"), rule(r"[ab]+@[ab]+(?:\.[ab]+)*", "#"))),
    Guardrails((rule("[^ab.\U0001f34e!#]", "#"),)),
    Guardrails((rule("ab", "cx"), rule("cx", "#"))),
    Guardrails((rule("\U0001f34ea", "\U0001f34e#"),)),
]


def replaced(guard: Guardrails, text: str) -> str:
    """Return the expected text, by replacing the first match until no match is left."""
    while True:
        found = []
        for each in guard.texts:
            read = text.lower() if each.reading == "folded" else text
            match = compiled(each.pattern).search(read)
            if match is not None:
                found.append((match.start(), match.end(), each.replacement))
        if not found:
            return text
        start, end, instead = min(found)
        text = text[:start] + instead + text[end:]


@dataclass
class Writer:
    """A controller with a list of actions: force tokens, or sample a certain token with forced tokens after it."""

    acts: list[tuple[bool, tuple[int, ...]]]
    views: list[View] = field(default_factory=list)

    def __call__(self, view: View) -> Reply:
        self.views.append(view)
        if view.num_asks >= len(self.acts):
            return Reply(Decision.stop())
        is_drawn, tokens = self.acts[view.num_asks]
        if not is_drawn:
            return Reply(Decision.splice(0, tokens))
        splices = (Splice(0, tokens[1:]),) if tokens[1:] else ()
        return Reply(Decision.sample(mask_of(tokens[:1], SIZE), splices=splices))


TOKENS = st.lists(st.integers(0, CLOSING - 1), min_size=1, max_size=9).map(tuple)
ACTS = st.lists(st.tuples(st.booleans(), TOKENS), min_size=1, max_size=6)


def spelled(text: str) -> tuple[int, ...]:
    return tuple(DECODER.tokens_of(text))


def moved(place: int, ask: Ask) -> int:
    """Return the position that a position has after the replacements."""
    for start, num_removed, num_added, _ in ask.changes:
        if place >= start + num_removed:
            place += num_added - num_removed
        elif place > start:
            place = start
    return place


def check_places(
    guard: Guardrails, acts: list[tuple[bool, tuple[int, ...]]], asked: list[Ask], tokens: list[int]
) -> None:
    """Check that a position between two actions stays between them, unless a match spans both."""
    places, end = [0], 0
    for ask, (_, done) in zip(asked, [(False, ()), *acts], strict=False):
        end += len(done)
        places = [moved(place, replace_prompt(ask)) for place in [*places, end]]
        end = places[-1]
    whole = DECODER.decode([token for _, done in acts for token in done])
    for number, place in enumerate(places[1:]):
        before = [token for _, done in acts[:number] for token in done]
        after = [token for _, done in acts[number:] for token in done]
        parts = DECODER.decode(before), DECODER.decode(after)
        left, right = (replaced(guard, part) for part in parts)
        is_apart = "".join(parts) == whole and "\ufffd" not in whole and left + right == replaced(guard, whole)
        if is_apart and all(replaced(guard, parts[0] + part) == left + part for part in ("a", "b", "x")):
            assert DECODER.decode(tokens[:place]) == left, (number, place)


def replace_prompt(ask: Ask) -> Ask:
    """Return the ask with changes whose positions count from the end of the prompt of three tokens."""
    changes = tuple(change._replace(start=change.start - 3) for change in ask.changes)
    return Ask(ask.seq_id, changes=changes)


PLACE = GUARDS[2], [(False, spelled("xab")), (False, spelled("xaabx")), (True, spelled("b"))]


@given(st.sampled_from(GUARDS), ACTS, st.sampled_from(["alone", "beside", "scored"]))
@example(GUARDS[0], [(False, spelled("x.aba.b")), (False, spelled("c.ba"))], "alone")
@example(GUARDS[0], [(True, spelled("a")), (False, spelled("ba.b"))], "alone")
@example(GUARDS[0], [(False, spelled("x.ab")), (True, spelled("a")), (True, spelled("cba"))], "beside")
@example(GUARDS[0], [(False, spelled("x.aba.b" * 30))], "beside")
@example(GUARDS[0], [(False, spelled("aba." * 300))], "alone")
@example(PLACE[0], PLACE[1], "alone")
def test_all_but_the_match_stays(guard: Guardrails, acts: list[tuple[bool, tuple[int, ...]]], how: str) -> None:
    acts = [*acts, (False, (CLOSING,))]
    writer, onlooker = Writer(acts), Writer([(False, ())])
    controller: object = FakeController(writer)
    fields: dict[str, object] = {"logprobs": 0} if how == "scored" else {}
    if how == "beside":
        controller = compose(controller, FakeController(lambda view: watch(onlooker, view)))
    lab = Lab(
        vocab_size=SIZE,
        decoder=DECODER,
        eos_token_ids=(EOS,),
        max_model_len=4000,
        num_blocks=2000,
        composed=how == "beside",
    )
    (replay,) = lab.run(make_request(guard=guard, controller=controller, max_tokens=3000, **fields))
    output = replay.first
    assert output.reason is FinishReason.CONTROLLER, output.finished
    whole = DECODER.decode([token for _, done in acts for token in done])
    assert output.text == replaced(guard, whole)
    assert DECODER.decode(output.tokens) == output.text
    assert output.usage.completion_tokens == len(output.tokens)
    for seen in [writer, *([onlooker] if how == "beside" else [])]:
        assert list(seen.views[-1].tokens[3:]) == output.tokens
    if how != "beside":
        check_places(guard, acts, lab.pool.asked, output.tokens)


def watch(onlooker: Writer, view: View) -> Reply:
    onlooker.views.append(view)
    return Reply(Decision.sample())


def test_each_fork_keeps_what_follows_its_own_match() -> None:
    def program(view: View) -> Reply:
        if view.num_asks == 0:
            return Reply(Decision.splice(0, spelled("x.ab")))
        if not view.path:
            ways = [Branch(sample=False, splices=(Splice(0, spelled(text)),)) for text in ("a.b!", "b.a!", "ax!")]
            return Reply(Decision.fork(ways) if view.num_asks == 1 else Decision.stop())
        return Reply(Decision.stop())

    lab = Lab(vocab_size=SIZE, decoder=DECODER, eos_token_ids=(EOS,))
    (replay,) = lab.run(make_request(guard=GUARDS[0], controller=FakeController(program), max_tokens=40))
    assert [output.text for output in replay.outputs.values()] == ["x.#.b!", "x.abb.a!", "x.#x!"]


def test_a_splice_that_takes_back_and_a_limit_hold_as_they_would() -> None:
    acts = [Decision.splice(0, spelled("x.abax")), Decision.splice(3, spelled("abax.b!"))]
    program = FakeController(lambda view: Reply(acts[view.num_asks] if view.num_asks < 2 else Decision.stop()))
    lab = Lab(vocab_size=SIZE, decoder=DECODER, eos_token_ids=(EOS,))
    taken, limited, stopped = lab.run(
        make_request(guard=GUARDS[0], controller=program, max_tokens=40),
        make_request(guard=GUARDS[0], controller=Writer([(False, spelled("abax.b"))]), max_tokens=3),
        make_request(guard=GUARDS[0], controller=Writer([(False, spelled("abax.b"))]), max_tokens=40, stop=(".",)),
    )
    assert taken.first.text == "x#x.b!"  # "x.#x", without its last three, and then the other
    assert limited.first.text == "#x." and limited.first.reason is FinishReason.LENGTH
    assert stopped.first.text == "#x" and stopped.first.reason is FinishReason.STOP


@pytest.mark.parametrize("speculate", [0, 4])
def test_a_model_may_say_it_by_itself(speculate: int) -> None:
    said = spelled("x.aba.abac!") * 3
    lab = Lab(
        vocab_size=SIZE,
        decoder=DECODER,
        eos_token_ids=(EOS,),
        next_token=lambda prefix: said[(len(prefix) - 3) % len(said)],
    )
    (replay,) = lab.run(make_request(guard=GUARDS[0], max_tokens=30, speculate=speculate))
    assert "aba" not in replay.first.text and DECODER.decode(replay.first.tokens) == replay.first.text
