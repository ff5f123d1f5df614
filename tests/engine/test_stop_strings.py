"""Tests that the emitted pieces of an output always add up to the decoded text, cut at the first stop string."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.outputs.stop_strings import OutputText
from bridle.testing.text import PieceDecoder
from tests.engine.support import more

PIECES = PieceDecoder(["a", "b", "ab", "", "ba", "aab", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", "ca"])
STOPS = [(), ("ab",), ("aab", "b"), ("ba", "é"), ("bab", "abba", "cab"), ("€a", "aaa")]


class Reader:
    """A client that joins the text that it gets."""

    def __init__(self, text: OutputText) -> None:
        self.text, self.seen, self.tokens = text, "", list[int]()

    def push(self, token: int) -> str | None:
        self.tokens.append(token)
        text, stop, num_taken, num_banned, hit = self.text.push(token)
        assert not (text and num_taken) and not num_banned and hit is None
        self.seen = self.seen[: len(self.seen) - num_taken] + text
        return stop

    def rewind(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]
        self.seen = self.seen[: len(self.seen) - self.text.rewind(num_tokens)]

    def copy(self) -> Reader:
        twin = Reader(self.text.copy())
        twin.seen, twin.tokens = self.seen, list(self.tokens)
        return twin


def certain(tokens: list[int]) -> str:
    """Return the text that no further token can change."""
    state = PIECES.open((), True)
    return "".join(state.push(token) for token in tokens)


def first_stop(tokens: list[int], stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the stop string that begins first among those that end within the last token's characters."""
    before, text = len(certain(tokens[:-1])), certain(tokens)
    found = [(text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in stops]
    return min(((start, stop) for start, stop in found if start >= 0), key=lambda m: m[0], default=None)


@more(8)
@given(st.integers(0, 1 << 40), st.sampled_from(STOPS), st.booleans())
def test_given_text_adds_up(seed: int, stops: tuple[str, ...], include: bool) -> None:
    random = Random(seed)
    readers = [Reader(OutputText(PIECES.open((), True), stops, include))]
    has_rewound = False
    for _ in range(40):
        reader = random.choice(readers)
        verb = random.random()
        if verb < 0.15 and reader.tokens:
            reader.rewind(random.randint(1, min(3, len(reader.tokens))))
            has_rewound = True
        elif verb < 0.2 and len(readers) < 4:
            readers.append(reader.copy())
        else:
            before = reader.seen
            stop = reader.push(random.randrange(len(PIECES.pieces)))
            expected = first_stop(reader.tokens, stops)
            assert stop == (expected and expected[1])
            assert has_rewound or reader.seen.startswith(before)  # only a rewind may bring a stop string late
            if expected is not None:
                check_stopped(reader, expected, include)
                return
        check_running(reader, stops)
    for reader in readers:
        assert reader.seen + reader.text.flush() == PIECES.decode(reader.tokens)


def check_running(reader: Reader, stops: tuple[str, ...]) -> None:
    text = certain(reader.tokens)
    assert text.startswith(reader.seen)
    assert len(reader.text.released_text()) == len(reader.seen)
    assert reader.text.released_text() == reader.seen
    held = text[len(reader.seen) :]
    assert not held or any(len(held) <= len(stop) for stop in stops)


def check_stopped(reader: Reader, match: tuple[int, str], include: bool) -> None:
    start, stop = match
    text = certain(reader.tokens)
    assert reader.seen == text[: start + len(stop) if include else start]
    assert reader.text.flush() == ""


@pytest.mark.parametrize(("include", "seen"), [(False, "xa"), (True, "xabc")])
def test_a_stop_string_over_several_tokens(include: bool, seen: str) -> None:
    decoder = PieceDecoder(["x", "a", "b", "c"])
    reader = Reader(OutputText(decoder.open((), True), ["bc"], include))
    shown = []
    for token in (0, 1, 2, 3):
        stop = reader.push(token)
        shown.append(reader.seen)
    assert (stop, reader.seen) == ("bc", seen)
    assert shown[:3] == ["x", "xa", "xa"]  # "b" is held back


def test_held_text_comes_out_when_it_leads_nowhere() -> None:
    decoder = PieceDecoder(["x", "a", "b", "c"])
    reader = Reader(OutputText(decoder.open((), True), ["aaab"], False))
    shown = []
    for token in (1, 1, 1, 1, 3):
        reader.push(token)
        shown.append(reader.seen)
    assert shown == ["", "", "", "a", "aaaac"]


def test_unfinished_characters_wait_and_end_as_replacement() -> None:
    reader = Reader(OutputText(PIECES.open((), True), (), False))
    reader.push(8)
    assert reader.seen == ""
    assert reader.text.copy().flush() == "\N{REPLACEMENT CHARACTER}"
    reader.push(9)
    assert reader.seen == "€"
