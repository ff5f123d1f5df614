"""Tests of phrases that an output may not contain: no client sees a banned phrase, or the beginning of one that was
removed. This holds for sampled, forked, forced and stopped outputs."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.control.decision import Branch, Decision, Splice, mask_of
from bridle.engine.guardrails import policy_enforcement
from bridle.errors import InvalidRequest
from bridle.outputs import FinishReason, Rewind
from bridle.testing.text import PieceDecoder
from tests.engine.random_labs import random_lab, random_request
from tests.engine.support import Lab, Output, Replay, make_request, more
from tests.fakes.controller_runtime import FakeController, Reply, View

PIECES = ["a", "b", "c", "d", "ab", "bc", " d", "é", b"\xc3", b"\xa9", "cab", "", "x", "."]
PHRASES = [("ab",), ("abc", "dd"), ("é",), ("c", "ba"), ("a bit", "d d"), ("aaa", "aab", "ca.")]
SEED = st.integers(0, 1 << 40)


def run(kv: str = "paged", **fields: object) -> tuple[Lab, Replay]:
    lab = Lab(kv=kv, vocab_size=len(PIECES), decoder=PieceDecoder(PIECES), eos_token_ids=(13,))
    (replay,) = lab.run(make_request(**fields))
    return lab, replay


def visible_texts(lab: Lab, replay: Replay) -> dict[int, list[str]]:
    """Return the text of each output after each event that shows text."""
    seen: dict[int, list[str]] = {}
    again = Replay(replay.request_id)
    for event in lab.events:
        again.add(event)
        seen.setdefault(event.index, []).append(again.outputs[event.index].text)
    return seen


@more(2)
@given(SEED, st.sampled_from(PHRASES))
def test_no_output_holds_a_phrase_and_none_takes_text_back(seed: int, phrases: tuple[str, ...]) -> None:
    random = Random(seed)
    fields = {
        "n": random.choice([1, 2, 4]),
        "max_tokens": random.choice([1, 6, 25]),
        "temperature": random.choice([0.0, 1.0, 2.0]),
        "logprobs": random.choice([None, 0, 2]),
        "stop": random.choice([(), ("bd",), ("cc", "abx")]),
        "include_stop_str_in_output": random.choice([False, True]),
        "seed": seed,
    }
    lab, replay = run(banned_phrases=phrases, **fields)
    assert not [event for event in lab.events if isinstance(event, Rewind)]
    shown = visible_texts(lab, replay)
    for index, output in replay.outputs.items():
        if output.reason is not FinishReason.ERROR:
            assert not [phrase for phrase in phrases if phrase in output.text]
        assert all(output.text.startswith(text) for text in shown[index])
        whole = PieceDecoder(PIECES).decode(output.tokens)
        assert whole.startswith(output.text) or output.reason is FinishReason.STOP
        assert output.usage.sampled_tokens - output.usage.rewound_tokens == len(output.tokens)


@given(SEED)
def test_a_phrase_that_is_never_said_changes_nothing(seed: int) -> None:
    fields = {"seed": seed, "n": 2, "max_tokens": 20, "logprobs": 1, "stop": ("cd",)}
    (_, plain), (_, banned) = run(**fields), run(banned_phrases=("zz", "abQ"), **fields)
    for index, output in plain.outputs.items():
        other = banned.outputs[index]
        assert (output.tokens, output.text, output.logprobs) == (other.tokens, other.text, other.logprobs)


@more(2)
@given(SEED, st.sampled_from(PHRASES), st.sampled_from(["paged", "sequences"]))
def test_drafts_change_nothing_but_the_time(seed: int, phrases: tuple[str, ...], kv: str) -> None:
    """Draft tokens are correct until a banned phrase appears, and often extend beyond the rollback."""
    random = Random(seed)
    fields = {
        "n": random.choice([1, 1, 2]),
        "max_tokens": random.choice([6, 25]),
        "temperature": random.choice([0.0, 1.0]),
        "logprobs": random.choice([None, 2]),
        "stop": random.choice([(), ("bd",)]),
        "seed": seed,
    }
    _, unbanned = run(**fields)
    _, plain = run(banned_phrases=phrases, **fields)
    told = random.choice([unbanned, plain]).first.tokens
    lab, drafted = run(
        kv=kv, banned_phrases=phrases, speculate=random.choice([2, 7]), prediction_ids=tuple(told), **fields
    )
    assert not [event for event in lab.events if isinstance(event, Rewind)]
    for index, output in plain.outputs.items():
        other = drafted.outputs[index]
        assert (other.tokens, other.text, other.logprobs) == (output.tokens, output.text, output.logprobs)
        assert other.reason == output.reason
        assert other.usage.sampled_tokens == output.usage.sampled_tokens
        assert other.usage.rewound_tokens == output.usage.rewound_tokens


@pytest.mark.parametrize("kv", ["paged", "sequences"])
@given(SEED, st.sampled_from(PHRASES))
def test_whatever_else_happens_nothing_breaks(kv: str, seed: int, phrases: tuple[str, ...]) -> None:
    """The engine's integrity checks pass with little memory, with many requests at once and controllers that fork,
    splice, rewind and wait. Sampled text contains no banned phrase unless a controller forced part of it."""
    random = Random(seed)
    lab = random_lab(random, kv)
    requests = [random_request(random, banned_phrases=phrases) for _ in range(random.randint(1, 4))]
    for request, replay in zip(requests, lab.run(*requests), strict=True):
        if request.controller is None:
            for output in replay.outputs.values():
                assert output.reason is FinishReason.ERROR or not any(phrase in output.text for phrase in phrases)


def test_what_was_shown_begins_no_stop_string_once_what_followed_it_went() -> None:
    """`ab` could be shown after more text followed. The rollback removed that text, and then `d` completed a stop
    string that begins with `b`."""
    fields = {"n": 2, "max_tokens": 25, "temperature": 0.0, "stop": ("bd",), "seed": 258542091905}
    lab, replay = run(banned_phrases=("abc", "dd"), **fields)
    assert not [event for event in lab.events if isinstance(event, Rewind)]
    assert replay.first.reason is FinishReason.STOP and replay.first.text == "xa"


def test_the_next_best_way_is_taken() -> None:
    """With greedy sampling, `b` after `a` is forbidden at its position, so the second best token comes there, and
    nowhere else."""
    _, plain = run(temperature=0.0, max_tokens=12, ignore_eos=True)
    text = plain.first.text
    phrase = text[3:6]
    _lab, banned = run(temperature=0.0, max_tokens=12, ignore_eos=True, banned_phrases=(phrase,))
    assert phrase in text and phrase not in banned.first.text
    assert banned.first.text[:2] == text[:2]
    assert banned.first.usage.rewound_tokens > 0


def test_when_nothing_else_can_be_said_the_output_ends_with_an_error() -> None:
    silent = dict.fromkeys((8, 9, 11), -math.inf)
    phrases = ("a", "b", "c", "d", "é", "x", ".")
    _, replay = run(max_tokens=9, banned_phrases=phrases, ignore_eos=True, logit_bias=silent)
    assert replay.first.finished is not None and replay.first.text == ""
    error = replay.first.finished.error
    assert isinstance(error, InvalidRequest) and error.param == "banned_phrases"


def test_retries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_enforcement, "MAX_RETRIES", 3)
    _, replay = run(max_tokens=9, banned_phrases=tuple("abcdx."), ignore_eos=True, seed=1)
    assert replay.first.finished is not None
    assert "3 ways to go on" in str(replay.first.finished.error)
    assert replay.first.usage.rewound_tokens == 4


@given(SEED)
def test_an_error_means_that_nothing_else_can_be_said(seed: int) -> None:
    """With two letters, almost every beginning of a phrase also begins other texts. If a text of the wanted length
    without a banned phrase exists, one is found."""
    random = Random(seed)
    phrases = tuple({"".join(random.choices("ab", k=random.randint(1, 4))) for _ in range(random.randint(1, 4))})
    silent = dict.fromkeys(range(2, len(PIECES)), -math.inf)
    _, replay = run(max_tokens=8, banned_phrases=phrases, ignore_eos=True, logit_bias=silent, seed=seed)
    possible = {"".join(letters) for letters in itertools.product("ab", repeat=8)}
    possible = {text for text in possible if not any(phrase in text for phrase in phrases)}
    assert replay.first.finished is not None
    if replay.first.finished.error is None:
        assert replay.first.text in possible
    else:
        assert not possible or is_stuck(replay.first.text, possible)


def is_stuck(shown: str, possible: set[str]) -> bool:
    """Return whether every continuation of the sent text has a banned phrase. Text is sent as soon as no phrase can
    begin in it."""
    return not any(text.startswith(shown) for text in possible)


def steered(program: object, **fields: object) -> tuple[Lab, Output]:
    lab, replay = run(controller=FakeController(program), **fields)  # type: ignore[arg-type]
    return lab, replay.first


def test_a_controller_hears_of_what_was_taken_back() -> None:
    """The controller's view always has the current tokens of the output, after any rollbacks."""
    views: list[tuple[int, ...]] = []

    def program(view: View) -> Reply:
        views.append(tuple(view.tokens))
        return Reply(Decision.sample(mask_of([0, 1, 2], len(PIECES))))

    _, output = steered(program, max_tokens=12, banned_phrases=("ab", "ca"), seed=3)
    assert "ab" not in output.text and "ca" not in output.text and len(output.tokens) == 12
    assert output.usage.rewound_tokens > 0
    texts = [PieceDecoder(PIECES).decode(view[3:]) for view in views]
    assert not [text for text in texts if "ab" in text or "ca" in text]
    assert texts[-1] == output.text[: len(texts[-1])]


def test_forced_text_stands_and_what_was_drawn_before_it_goes() -> None:
    """`ab` stays if both letters were forced. If `a` was sampled and `b` was forced after it, `a` is rolled back."""

    def forces(view: View) -> Reply:
        if len(view.tokens) == 3:
            return Reply(Decision.splice(0, (0, 1)))
        return Reply(Decision.sample(mask_of([2], len(PIECES))))

    _, output = steered(forces, max_tokens=4, banned_phrases=("ab",))
    assert output.text == "abcc"

    def follows(view: View) -> Reply:
        if len(view.tokens) % 2:
            return Reply(Decision.sample(mask_of([0, 2], len(PIECES))))
        return Reply(Decision.splice(0, (1,)))

    _, output = steered(follows, max_tokens=6, banned_phrases=("ab",), seed=1)
    assert output.text == "cbcbcb"


def test_a_splice_that_completes_a_phrase_takes_its_draw_along() -> None:
    def program(view: View) -> Reply:
        branch = Branch(mask=mask_of([0, 2], len(PIECES)), splices=(Splice(0, (1,), frozenset({0})),))
        return Reply(Decision((branch,)))

    _, output = steered(program, max_tokens=5, banned_phrases=("ab",), seed=5)
    assert output.text == "ccccc"
