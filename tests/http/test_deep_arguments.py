"""Tests of deeply nested arguments of tool calls: a model may write them, and no answer fails because of them."""

from __future__ import annotations

import pytest

from bridle.chat.chat_request import TurnReader
from bridle.chat.stream_deltas import CallArguments, StreamDelta, ToolCallStart
from bridle.errors import InvalidRequest
from bridle.http.anthropic.shapes import blocks
from bridle.http.ollama.answer import CallCollector
from bridle.outputs import ChatMessage, ToolCall
from bridle.traces.format import decode_record

DEEP = "[" * 100_000
PIECES: list[StreamDelta] = [ToolCallStart(0, "f", "a"), CallArguments(0, DEEP)]


def test_ollama_gives_empty_arguments() -> None:
    collector = CallCollector()
    collector.add(PIECES)
    assert collector.rest()[0]["function"]["arguments"] == {}


def test_anthropic_gives_empty_arguments() -> None:
    assert blocks(ChatMessage(calls=[ToolCall("a", "f", DEEP)]))[0]["input"] == {}


def test_such_a_call_is_not_complete() -> None:
    class Tools:
        def push(self, text: str, is_last: bool) -> list[StreamDelta]:
            return PIECES

    reader = TurnReader(None, Tools())  # type: ignore[arg-type]
    reader.push("x")
    assert not reader.has_calls


@pytest.mark.parametrize("line", [DEEP.encode(), b'{"type": "token", "text": "\xff"}', b'{"a": ' + DEEP.encode()])
def test_such_a_line_of_a_trace_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_record(line)
