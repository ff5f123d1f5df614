"""A marked part of an output, such as a tool call, is not repeated: its second occurrence ends the output and is
removed."""

from __future__ import annotations

import pytest

from bridle.engine.outputs.repeats import MAX_PARTS, Repeats
from bridle.engine.outputs.stop_strings import REPEATED, OutputText
from bridle.engine.request import RepeatMarks
from bridle.testing.text import PieceDecoder

PIECES = PieceDecoder(["(", ")", "a", "b", " ", "(a", ")(", "x)", "!"])
MARKS = RepeatMarks("(", ")", "!")


def written(pieces: list[str], *, stop: tuple[str, ...] = (), include: bool = False) -> tuple[str, str | None]:
    """Return the text that a client gets from these pieces, and the reason for its end."""
    text = OutputText(PIECES.open((), True), stop, include, repeats=Repeats(MARKS))
    shown = ""
    for piece in pieces:
        released = text.push(PIECES.pieces.index(piece.encode()))
        shown += released.text
        if released.stop is not None:
            return shown, released.stop
    return shown + text.flush(), None


@pytest.mark.parametrize(
    ("pieces", "shown", "stop"),
    [
        (["(", "a", ")", "(", "a", ")", "b"], "(a)", REPEATED),
        (["(", "a", ")", " ", "(", "b", ")", " ", "(", "a", ")"], "(a) (b) ", REPEATED),
        (["(a", ")(", "a", ")", "b"], "(a)", REPEATED),
        (["(", "a", ")", "(", "a", "b", ")", "a"], "(a)(ab)a", None),
        (["(", "a", ")", "(", "a"], "(a)(a", None),
        (["(", "a", ")", "!", "(", "a", ")", "b"], "(a)!(a)b", None),
        (["a", ")", "a", ")"], "a)a)", None),
    ],
)
def test_a_repeated_part_ends_the_text(pieces: list[str], shown: str, stop: str | None) -> None:
    assert written(pieces) == (shown, stop)
    assert written(pieces, include=True) == (shown, stop)  # a part is no stop string of the client's


def test_stop_strings_of_the_client_hold_as_well() -> None:
    assert written(["(", "a", ")", "b", "a"], stop=("ba",)) == ("(a)", "ba")


def test_what_was_taken_back_may_come_again() -> None:
    text = OutputText(PIECES.open((), True), (), False, repeats=Repeats(MARKS))
    ids = [PIECES.pieces.index(piece) for piece in (b"(", b"a", b")")]
    for _ in range(3):
        assert all(text.push(token).stop is None for token in ids)
        fork = text.copy()
        assert [fork.push(token).stop for token in ids][-1] == REPEATED
        text.rewind(3)


def test_so_many_parts_are_remembered_and_no_more() -> None:
    found = Repeats(MARKS)
    for number in range(2 * MAX_PARTS):
        part = f"({number})"
        found.add(part, 0, len(part))
    assert len(found.texts) == MAX_PARTS
