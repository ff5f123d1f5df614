"""Tokens in a terminal: each origin in its colour, what was rolled back struck through, and plain text elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bridle.cli.token_colours import TokenPrinter, colour_text, show_traces
from bridle.traces import Draw, EndRecord, Odds, Record, ReplacedRecord, RewindRecord, TokenRecord, Trace, TraceHeader

FOUGHT = Draw(Odds(-9.0, 5), Odds(0.0, 1), 1, 0.9)


def token(text: str, **how: object) -> TokenRecord:
    return TokenRecord(0, 1, 0, 1, text, text, **how)  # type: ignore[arg-type]


RECORDS: list[Record] = [
    token("one"),
    token(" two", forced=True, by="me"),
    token(" three"),
    RewindRecord(0, 2, 1, 6),
    token(" four", drafted=True),
    token(" five", draw=FOUGHT),
    EndRecord(0, 3, "stop", " held"),
]


def printed(records: list[Record], width: int = 80, **how: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, **how)  # type: ignore[arg-type]
    printer = TokenPrinter(console)
    for record in records:
        printer.print(record)
    return out.getvalue()


TERMINAL = {"force_terminal": True, "color_system": "standard", "_environ": {"TERM": "xterm"}}


def test_each_origin_has_its_colour() -> None:
    assert printed(RECORDS, **TERMINAL) == (
        "one\x1b[36m two\x1b[0m three\x1b[6D\x1b[9;31m three\x1b[0m\x1b[32m four\x1b[0m\x1b[33m five\x1b[0m held"
    )


def test_without_colours_what_was_taken_back_is_struck_through_all_the_same() -> None:
    plain = printed(RECORDS, **{**TERMINAL, "_environ": {"TERM": "xterm", "NO_COLOR": "1"}})
    assert plain == "one two three\x1b[6D\x1b[9m three\x1b[0m four five held"


def test_a_pipe_gets_plain_text() -> None:
    assert printed(RECORDS) == "one two three«-1» four five held"


@pytest.mark.parametrize(
    ("records", "shown"),
    [
        ([token("one\ntwo"), RewindRecord(0, 1, 2, 5)], "one\ntwo«-2»"),  # it begins on a row before this one
        ([token("x" * 90), RewindRecord(0, 1, 1, 4)], "x" * 90 + "«-1»"),  # the terminal has begun a new row
        ([token("a"), token("b"), RewindRecord(0, 1, 1, 1), RewindRecord(0, 1, 1, 1)], "ab\x1b[1Db«-1»"),
        ([token("a\tb"), RewindRecord(0, 1, 1, 1)], "a       b«-1»"),
        ([token("世界"), RewindRecord(0, 1, 1, 1)], "世界\x1b[2D界"),  # two columns each
        ([ReplacedRecord(0, 1, 9, "no"), token("b"), RewindRecord(0, 1, 1, 1)], "nob\x1b[1Db"),
    ],
)
def test_what_cannot_be_written_over_is_told(records: list[Record], shown: str) -> None:
    assert re.sub(r"\x1b\[[\d;]*m", "", printed(records, **TERMINAL)) == shown


def screen(text: str, width: int) -> list[str]:
    """Return the rows of a terminal after printing `text`. Text that was struck through is in upper case."""
    rows: list[list[str]] = [[]]
    at, is_struck = 0, False
    for found in re.finditer(r"\x1b\[(\d*)D|\x1b\[([\d;]*)m|(.)", text, re.DOTALL):
        back, style, letter = found.groups()
        if back is not None:
            at -= int(back)
            assert at >= 0
        elif style is not None:
            is_struck = "9" in style.split(";")
        elif letter == "\n":
            rows, at = [*rows, []], 0
        else:
            if at == width:
                rows, at = [*rows, []], 0
            rows[-1][at : at + 1] = [letter.upper() if is_struck else letter]
            at += 1
    return ["".join(row) for row in rows]


@given(
    st.lists(st.one_of(st.text("abc\n", min_size=1, max_size=9), st.integers(1, 4)), max_size=20), st.integers(8, 30)
)
def test_the_screen_shows_what_stayed_and_what_went(steps: list[str | int], width: int) -> None:
    """Without struck-through text and signs, the text on the screen is the output's text."""
    records: list[Record] = []
    kept: list[str] = []
    for step in steps:
        if isinstance(step, str):
            kept.append(step)
            records.append(token(step))
        elif kept:
            taken = kept[-step:]
            del kept[-step:]
            records.append(RewindRecord(0, 1, len(taken), len("".join(taken))))
    shown = "".join(screen(printed(records, width, **TERMINAL), width))
    if "«" not in shown:
        assert re.sub("[A-Z]", "", shown) == "".join(kept).replace("\n", "")


def test_hostile_texts_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07[red]x[/red]"
    trace = Trace(TraceHeader("a"), [token(hostile), EndRecord(0, 2, "stop")])
    show_traces([trace])
    for text in (capsys.readouterr().out, printed([token(hostile)], **TERMINAL), colour_text(trace, 0).plain):
        assert "\x1b" not in text and "\x07" not in text and "[red]x[/red]" in text
