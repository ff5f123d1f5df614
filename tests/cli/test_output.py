"""What a terminal is told of a text's speed: only tokens that came later than the first ones count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bridle.cli.output import TextStream
from bridle.engine.client import EventStream
from bridle.outputs import Finished, FinishReason, TokenEvent
from tests.engine.support import make_request


def read(*batches: int) -> TextStream:
    """A stream whose tokens came in batches of these sizes, a second apart."""
    request, now = make_request(id="r"), [0.0]
    source = EventStream("r", print)

    def clock() -> float:
        return now[0]

    model: Any = SimpleNamespace(client=SimpleNamespace(submit=lambda _: source))
    stream = TextStream(model, request, clock)
    pieces = iter(stream)
    for size in batches:
        now[0] += 1.0
        put(source, [TokenEvent("r", 0, 1, "a")] * size)
        assert [next(pieces) for _ in range(size)] == ["a"] * size
    put(source, [Finished("r", 0, FinishReason.STOP)])
    assert "".join(pieces) == ""
    return stream


def put(source: EventStream, events: list[Any]) -> None:
    source.put(events)
    source.wake()


@pytest.mark.parametrize(
    ("batches", "shown"),
    [((1, 1, 1), "then 1.0 tokens/s"), ((3, 2, 2), "then 2.0 tokens/s"), ((3,), None), ((1,), None)],
)
def test_tokens_that_come_together_have_no_speed(batches: tuple[int, ...], shown: str | None) -> None:
    summary = read(*batches).summary
    assert (shown in summary) if shown else ("tokens/s" not in summary)
