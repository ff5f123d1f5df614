"""Tests of output to a terminal: the displayed text, and its speed, which counts only tokens after the first ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bridle.cli.output import TerminalTextStream
from bridle.engine.client import EventStream
from bridle.errors import ControllerError
from bridle.outputs import Event, Finished, FinishReason, Forked, Rewind, TokenEvent, Usage
from bridle.serving.lifecycle import request_record
from tests.engine.support import make_request


def stream_of(
    *events: Event, controller: object | None = None, **options: Any
) -> tuple[TerminalTextStream, EventStream]:
    """Return a terminal stream over these events, and its source, to which more events can be added."""
    source = EventStream("r", print)
    if events:
        put(source, *events)
    model: Any = SimpleNamespace(client=SimpleNamespace(submit=lambda _: source))
    return TerminalTextStream(model, make_request(id="r", controller=controller), **options), source


def put(source: EventStream, *events: Event) -> None:
    source.put(list(events))
    source.wake()


def token(text: str, index: int = 0) -> TokenEvent:
    return TokenEvent("r", index, 1, text)


def end(index: int = 0, **fields: Any) -> Finished:
    return Finished("r", index, **{"reason": FinishReason.STOP, **fields})


def read(monkeypatch: pytest.MonkeyPatch, *batches: int) -> TerminalTextStream:
    """Return a stream whose tokens arrived in batches of these sizes, one second apart."""
    now = [0.0]
    monkeypatch.setattr(request_record, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream, source = stream_of()
    pieces = iter(stream)
    for size in batches:
        now[0] += 1.0
        put(source, *[token("a")] * size)
        assert next(pieces) == "a" * size
    put(source, end())
    assert "".join(pieces) == ""
    return stream


@pytest.mark.parametrize(
    ("batches", "shown"),
    [((1, 1, 1), "then 1.0 tokens/s"), ((3, 2, 2), "then 2.0 tokens/s"), ((3,), None), ((1,), None)],
)
def test_tokens_that_come_together_have_no_speed(
    monkeypatch: pytest.MonkeyPatch, batches: tuple[int, ...], shown: str | None
) -> None:
    summary = read(monkeypatch, *batches).summary
    assert "first after 0.00 s" in summary  # nothing is submitted before it is read
    assert (shown in summary) if shown else ("tokens/s" not in summary)


TAKEN_BACK = (token("a"), token("b"), Rewind("r", 0, 1, 1), token("c"), end())


def test_what_is_taken_back_is_not_told() -> None:
    stream, _ = stream_of(*TAKEN_BACK, controller=object())
    assert "".join(stream) == "ac" == stream.output.text


def test_with_marks_all_is_told_at_once() -> None:
    stream, _ = stream_of(*TAKEN_BACK, controller=object(), marks=True)
    assert "".join(stream) == "ab \u21a9 c"
    assert stream.output.text == "ac"


def test_of_forks_the_first_output_is_told() -> None:
    ends = end(usage=Usage(completion_tokens=2), is_last=False), end(1, usage=Usage(completion_tokens=1))
    forked = Forked("r", 1, parent=0, num_tokens=1, text="a")
    stream, _ = stream_of(token("a"), forked, token("b"), token("x", 1), *ends)
    assert "".join(stream) == "ab"
    assert stream.summary.startswith("0 tokens in, 3 out")


def test_a_failure_is_raised_after_the_text() -> None:
    stream, _ = stream_of(token("a"), end(reason=FinishReason.ERROR, error=ControllerError("it broke")))
    pieces = iter(stream)
    assert next(pieces) == "a"
    with pytest.raises(ControllerError, match="it broke"):
        list(pieces)
