"""Writes answers of `/api/chat` and `/api/generate`: one object, or a stream whose last object has counts and times.

A tool call is sent when its arguments are complete, because Ollama's API has no partial calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from bridle.chat.chat_request import ChatRequest, TurnReader
from bridle.chat.stream_deltas import CallArguments, Content, StreamDelta, Thought, ToolCallStart
from bridle.http.event_template import text_of
from bridle.http.ollama.ndjson import Row, lines, nanoseconds, send_rows, timestamp
from bridle.http.openai.logprobs import chat_logprobs
from bridle.http.sse import SseWriter
from bridle.outputs import FinishReason
from bridle.serving import Delta
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.lifecycle.live_text import LiveText


class Shape(Protocol):
    """Function that formats a part of an answer as a message or as a text."""

    def __call__(self, text: str, thoughts: str, calls: list[Row]) -> Row:
        """Return the fields for new text, reasoning and tool calls."""


def chat_shape(text: str, thoughts: str, calls: list[Row]) -> Row:
    """Return the fields of `/api/chat`."""
    return {"message": {"role": "assistant", "content": text} | _further(thoughts, calls)}


def text_shape(text: str, thoughts: str, calls: list[Row]) -> Row:
    """Return the fields of `/api/generate`."""
    return {"response": text} | _further(thoughts, calls)


def _further(thoughts: str, calls: list[Row]) -> Row:
    return ({"thinking": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


@dataclass(slots=True)
class OllamaAnswer:
    """Writes the output of a generation. `load_seconds` is the time that the request waited for its model to load. If
    `context` is set, the last object has the tokens of the conversation."""

    generation: Generation
    turn: ChatRequest
    name: str
    shape: Shape
    load_seconds: float = 0.0
    num_top: int | None = None
    context: bool = False
    _reader: TurnReader = field(init=False)
    _calls: CallCollector = field(init=False)

    def __post_init__(self) -> None:
        self._reader = self.turn.reader()
        self._calls = CallCollector()

    def whole(self) -> Row:
        """Return the response of a request that does not stream."""
        (part,) = self.generation.parts
        output = part.outputs[0]
        found = self.turn.message(output)
        self.turn.keep(self.generation.model, part.request, [(output, found)])
        calls = [_call(number, call.id, call.name, call.arguments) for number, call in enumerate(found.calls)]
        logprobs = self._logprobs(tuple(output.token_ids), output.logprobs)
        return self._row(self.shape(found.content, found.thoughts, calls)) | logprobs | self._ending()

    async def stream(self, writer: SseWriter) -> None:
        """Write the objects of a request that streams."""
        (part,) = self.generation.parts

        async def sink(part: SubRequest, events: object) -> LiveText | None:
            deltas = [delta for delta in part.reader.read() if delta.index == 0]
            await send_rows(writer, *(row for delta in deltas for row in self._rows(delta)))
            is_live = part.is_plain and self.num_top is None
            return writer.live(lambda tokens: lines(*self._rows(Delta(0, text_of(tokens))))) if is_live else None

        await self.generation.run(sink)
        self.turn.keep(self.generation.model, part.request, [(part.outputs[0], self._reader.found)])
        rows = [self._row(self.shape("", "", calls)) for calls in [self._calls.rest()] if calls]
        await send_rows(writer, *rows, self._row(self.shape("", "", [])) | self._ending())

    def _rows(self, delta: Delta) -> list[Row]:
        pieces = self._reader.push(delta.text, delta.is_last)
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        calls = self._calls.add(pieces)
        logprobs = self._logprobs(delta.tokens, list(delta.logprobs))
        if not (text or thoughts or calls or logprobs):
            return []
        return [self._row(self.shape(text, thoughts, calls)) | logprobs]

    def _row(self, fields: Row) -> Row:
        return {"model": self.name, "created_at": timestamp(), **fields, "done": False}

    def _logprobs(self, tokens: tuple[int, ...], entries: list[Any] | None) -> Row:
        if self.num_top is None or not tokens or not entries:
            return {}
        return {"logprobs": chat_logprobs(self.generation.model.tokenizer, tokens, entries, self.num_top)["content"]}

    def _ending(self) -> Row:
        """Return the fields of the last object: finish reason, counts, times, and the output of controllers."""
        (part,) = self.generation.parts
        output, story, usage = part.outputs[0], self.generation.story, self.generation.usage
        now = time.monotonic()
        submitted = story.submitted or now
        computed = story.computed or story.first_token or now
        ending: Row = {"done": True, "done_reason": _done_reason(output.finish_reason)}
        if self.context:
            ending["context"] = [*self.turn.prompt, *output.token_ids]
        return ending | {
            "total_duration": nanoseconds(now - story.began),
            "load_duration": nanoseconds(self.load_seconds),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(computed - submitted),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds((story.last_token or now) - computed),
            "seed": part.request.sampling.seed,
            **({"usage": usage.constraint_fields()} if usage.constraint is not None else {}),
            **part.note_fields(0),
        }


def _done_reason(reason: FinishReason | None) -> str:
    return "length" if reason is FinishReason.LENGTH else "stop"


class CallCollector:
    """Joins the pieces of tool calls. A call is complete when the next call begins, or the answer ends."""

    def __init__(self) -> None:
        self._number = -1
        self._open: tuple[str, str, list[str]] | None = None

    def add(self, pieces: Iterable[StreamDelta]) -> list[Row]:
        """Add pieces of an answer. Returns the tool calls that are now complete."""
        done: list[Row] = []
        for piece in pieces:
            match piece:
                case ToolCallStart():
                    done += self.rest()
                    self._number, self._open = self._number + 1, (piece.id, piece.name, [])
                case CallArguments() if self._open is not None:
                    self._open[2].append(piece.text)
        return done

    def rest(self) -> list[Row]:
        """Close the open tool call. Returns a list with this call, or an empty list if no call is open."""
        opened, self._open = self._open, None
        return [] if opened is None else [_call(self._number, opened[0], opened[1], "".join(opened[2]))]


def _call(number: int, call_id: str, name: str, arguments: str) -> Row:
    """Return a tool call in Ollama's format. The arguments are empty if the output ended inside them."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = {}
    return {"id": f"call_{call_id}", "function": {"index": number, "name": name, "arguments": value}}
