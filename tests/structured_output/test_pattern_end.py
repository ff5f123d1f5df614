"""Tests that a text under a regex ends when it matches and the model would leave the pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bridle.controllers import PythonControllerPool
from bridle.controllers.composition import allows
from bridle.controllers.reasoning_gate import CompiledGrammar, ReasoningThenGrammar
from bridle.engine.control.decision import Branch, Outside, Splice, mask_of
from bridle.outputs import FinishReason
from bridle.structured_output import Concat, Constraint, Regex, parse
from tests.structured_output.kit import EOS, Lab, matcher, spell, text_vocabulary

WORD = Regex("[A-Z][a-z]+")


def writes(text: str) -> Callable[[Sequence[int]], int]:
    """Return a model that prefers these characters after a prompt of two tokens, whatever the earlier output is."""
    return lambda prefix: ord(text[min(len(prefix) - 2, len(text) - 1)])


@pytest.mark.parametrize(
    ("constraint", "wanted", "options", "written", "reason"),
    [
        (WORD, "Paris, France", {}, "Paris", FinishReason.CONTROLLER),
        (WORD, "Paris", {"max_tokens": 3}, "Par", FinishReason.LENGTH),
        # Where the mask applies, this model's choice among what is left is the end token.
        (Regex("[0-9]*"), "The 42", {}, "", FinishReason.STOP),
        (Regex("[a-z]+", longest=True), "is. ", {}, "is", FinishReason.STOP),
        (parse({"regex": "[a-z]+", "longest": True}), "is. ", {}, "is", FinishReason.STOP),
        (Concat(Regex("[a-z]+"), Regex("!?")), "is. ", {}, "is", FinishReason.STOP),
        (Regex("[a-z]+"), "is. ", {"min_tokens": 4, "max_tokens": 4}, "isaa", FinishReason.LENGTH),
    ],
)
def test_a_text_ends_where_the_model_leaves_the_pattern(
    constraint: Constraint, wanted: str, options: dict[str, object], written: str, reason: FinishReason
) -> None:
    with Lab(text_vocabulary(), next_token=writes(wanted)) as lab:
        output = lab.run_one(constraint, **options)
        assert output.finished is not None
        assert (spell(lab.vocab, output.tokens), output.finished.reason) == (written, reason)


def test_a_client_that_ignores_ends_gets_the_mask() -> None:
    with Lab(text_vocabulary(), next_token=writes("is. ")) as lab:
        assert lab.run_one(Regex("[a-z]+"), ignore_eos=True).tokens == [ord("i"), ord("s"), EOS]


def test_an_end_by_the_pattern_is_one_of_the_constraint() -> None:
    with Lab(text_vocabulary(), next_token=writes("Paris.")) as lab:
        output = lab.run_one(WORD)
        assert output.finished is not None and output.finished.reason is FinishReason.CONTROLLER
        assert not any(output.forced)


def test_a_token_that_begins_inside_of_the_pattern_is_no_end() -> None:
    """`" the"` begins with an allowed space, so the mask applies, and the text ends at the next possible place."""
    vocab = text_vocabulary()
    the = vocab.token_of(b" the")
    assert the is not None

    def wants(prefix: Sequence[int]) -> int:
        return ord("a") if len(prefix) == 2 else the

    with Lab(vocab, next_token=wants) as lab:
        output = lab.run_one(Regex("a[ .]?[!]?"))
        assert spell(vocab, output.tokens)[:2] in ("a ", "a.", "a!") or output.tokens[1:] == [EOS]


@pytest.mark.parametrize("wanted", ["Paris. And", "Parisx And"])
def test_drafts_change_nothing(wanted: str) -> None:
    drafts = {"speculate": 8, "prediction_ids": tuple(map(ord, "Paris. And"))}
    with Lab(text_vocabulary(), next_token=writes(wanted)) as lab:
        assert lab.run_one(WORD, **drafts).tokens == lab.run_one(WORD).tokens


def test_forks_end_by_themselves() -> None:
    with Lab(text_vocabulary(), next_token=writes("Paris. And")) as lab:
        (outputs,) = lab.run(lab.request(WORD, n=3))
        assert [spell(lab.vocab, output.tokens) for output in outputs.values()] == ["Paris"] * 3


def test_the_end_holds_after_thoughts() -> None:
    vocab = text_vocabulary()
    then = CompiledGrammar(matcher(vocab, WORD), vocab, WORD)
    thinking = ReasoningThenGrammar(end=ord(">"), then=then, may_stop=False)
    with Lab(vocab, pools=[PythonControllerPool(vocab.size)], next_token=writes("hm>Paris.")) as lab:
        assert spell(vocab, lab.run_one(thinking).tokens) == "hm>Paris"


def test_what_the_pattern_forbids_is_not_forced_by_another_controller() -> None:
    draw = Branch(splices=(Splice(1, (), Outside(mask_of([5, 9], 32))),))
    assert [allows(draw, token) for token in (4, 5, 9, 10)] == [False, True, True, False]
