"""Scales of control vectors by position, compared with a list that has one entry for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.control.vector_scales import VectorScales

KEYS = {"a": "a#1", "b": "b#2"}
SCALES = st.dictionaries(st.sampled_from("ab"), st.sampled_from([0.0, 0.5, -2.0]))
#: Change scales and append tokens, or keep a part of the tokens.
MOVES = st.lists(st.tuples(SCALES, st.integers(0, 4)) | st.integers(1, 12), max_size=12)


def as_mix(scales: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((KEYS[name], scale) for name, scale in scales.items() if scale))


def played(moves: Sequence[tuple[Mapping[str, float], int] | int]) -> tuple[VectorScales, list[Mapping[str, float]]]:
    """Return the scales after these moves on a prompt of 3 tokens, and the scales of each position."""
    first = {"a": 1.0, "b": 0.0}
    held, known = VectorScales.of(KEYS, first), [first] * 3
    current: Mapping[str, float] = first
    changes = {0: first}  # by position
    for move in moves:
        if isinstance(move, int):
            known = known[:move]
            held = held.before(len(known))
            changes = {at: value for at, value in changes.items() if at < len(known)}
            current = changes[max(changes)]
        else:
            held, current = held.changed(len(known), move[0]), {**current, **move[0]}
            changes[len(known)] = current
            known = known + [current] * move[1]
    return held, known


@given(moves=MOVES, start=st.integers(0, 20), length=st.integers(0, 20))
def test_spans_are_the_scales_of_each_position(
    moves: list[tuple[Mapping[str, float], int] | int], start: int, length: int
) -> None:
    held, known = played(moves)
    end = min(start + length, len(known))
    found: list[object] = [()] * max(end - start, 0)
    for span in held.spans(start, end):
        assert span.mix
        found[span.offset : span.offset + span.length] = [span.mix] * span.length
    assert found == [as_mix(scales) for scales in known[start:end]]


@given(one=MOVES, other=MOVES, start=st.integers(0, 8), length=st.integers(1, 4))
def test_marks_are_equal_where_the_scales_are(
    one: list[tuple[Mapping[str, float], int] | int],
    other: list[tuple[Mapping[str, float], int] | int],
    start: int,
    length: int,
) -> None:
    (held, known), (held_too, known_too) = played(one), played(other)
    end = min(start + length, len(known), len(known_too))
    mixes, mixes_too = ([as_mix(scales) for scales in each[start:end]] for each in (known, known_too))
    same = held.marks(start, end) == held_too.marks(start, end)
    assert same or mixes != mixes_too
    if mixes != mixes_too:
        assert not same
    if not any(mixes):
        assert held.marks(start, end) == b"", "without a vector, blocks are shared with requests that name none"


def test_a_change_that_changes_nothing_adds_nothing() -> None:
    held = VectorScales.of(KEYS, {"a": 1.0, "b": 0.0})
    assert held.changed(5, {"a": 1.0}) is held


def test_two_changes_at_one_position_add_up() -> None:
    held = VectorScales.of(KEYS, {"a": 1.0, "b": 0.0}).changed(5, {"b": 2.0}).changed(5, {"a": 0.5})
    (span,) = held.spans(5, 6)
    assert span.mix == (("a#1", 0.5), ("b#2", 2.0))
