"""Builds answers in Anthropic's format: a complete list of content blocks, or a stream of events that open, fill and
close blocks.

Fields that can be null in Anthropic's schema are always present, because typed clients read them without a default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bridle.chat.stream_deltas import CallArguments, Content, StreamDelta, Thought, ToolCallStart
from bridle.engine.request import Retention
from bridle.http.anthropic.cache_control import SHORT_SECONDS
from bridle.http.openai.responses_common import usage_shape
from bridle.outputs import ChatMessage, CompletionOutput, FinishReason, Usage

Event = dict[str, Any]
_NULL_STOP: Event = {"stop_sequence": None, "stop_details": None, "container": None}
#: The null counts of a message. The end of a stream does not repeat them.
_NULL_COUNTS: Event = {
    "inference_geo": None,
    "service_tier": "standard",
    "speed": None,
    "iterations": None,
    "fallback_credit": None,
}


def message_shape(call_id: str, model: str, content: list[Event], usage: Event) -> Event:
    """Return an assistant's message without the fields about its end, which `stop_fields` returns."""
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "usage": usage | _NULL_COUNTS,
        "diagnostics": None,
        "context_management": None,
    } | _NULL_STOP


def blocks(found: ChatMessage) -> list[dict[str, Any]]:
    """Return the content blocks of a complete answer."""
    made: list[dict[str, Any]] = []
    if found.thoughts:
        made.append({"type": "thinking", "thinking": found.thoughts, "signature": ""})
    if found.content or not (found.calls or found.thoughts):
        made.append(_text(found.content))
    return made + [_tool_use(call.id, call.name, _object(call.arguments)) for call in found.calls]


def stop_fields(output: CompletionOutput, has_calls: bool) -> dict[str, Any]:
    """Return the fields that say why the answer ended."""
    if output.finish_reason is FinishReason.LENGTH:
        return _NULL_STOP | {"stop_reason": "max_tokens"}
    if has_calls:
        return _NULL_STOP | {"stop_reason": "tool_use"}
    if isinstance(output.stop_reason, str):
        return _NULL_STOP | {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    return _NULL_STOP | {"stop_reason": "end_turn"}


def usage_fields(usage: Usage, num_thinking: int, retains: Sequence[Retention] = ()) -> dict[str, Any]:
    """Return Anthropic's token counts at the end of a stream. Input tokens exclude tokens from the cache, and tokens
    whose KV is retained because of the breakpoints `retains`."""
    cached = usage.cached_tokens
    end = min(usage.retained_tokens, max((each.num_tokens for each in retains), default=0))
    long = max((each.num_tokens for each in retains if each.seconds > SHORT_SECONDS), default=0)
    created, created_long = max(end - cached, 0), max(min(end, long) - cached, 0)
    return {
        "input_tokens": usage.prompt_tokens - cached - created,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": created,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - created_long,
            "ephemeral_1h_input_tokens": created_long,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": num_thinking}
        | usage_shape(usage, num_thinking)["completion_tokens_details"],
        "server_tool_use": None,
        **usage.constraint_fields(),
    }


class BlockWriter:
    """Converts pieces of an answer to stream events. One content block is open at a time."""

    def __init__(self) -> None:
        self._number = -1
        self._kind: str | None = None

    @property
    def is_text(self) -> bool:
        """Return whether the open block is a text block."""
        return self._kind == "text"

    def add(self, pieces: Iterable[StreamDelta]) -> list[Event]:
        """Return the events for pieces of an answer."""
        return [event for piece in pieces for event in self._of(piece)]

    def close(self) -> list[Event]:
        """Return the events that end the last block. An answer without blocks gets an empty text block."""
        return self._close() if self._number >= 0 else [*self._open("text", _text("")), *self._close()]

    def _of(self, piece: StreamDelta) -> list[Event]:
        match piece:
            case Thought():
                opened = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return [*opened, self._delta({"type": "thinking_delta", "thinking": piece.text})]
            case Content():
                opened = self._open("text", _text(""))
                return [*opened, self._delta({"type": "text_delta", "text": piece.text})]
            case ToolCallStart():
                return self._open(f"call {piece.number}", _tool_use(piece.id, piece.name, {}))
            case CallArguments():
                return [self._delta({"type": "input_json_delta", "partial_json": piece.text})]

    def _open(self, kind: str, block: dict[str, Any]) -> list[Event]:
        if kind == self._kind:
            return []
        events = self._close()
        self._number, self._kind = self._number + 1, kind
        return [*events, {"type": "content_block_start", "index": self._number, "content_block": block}]

    def _close(self) -> list[Event]:
        if self._kind is None:
            return []
        self._kind = None
        return [{"type": "content_block_stop", "index": self._number}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._number, "delta": delta}


def _text(text: str) -> dict[str, Any]:
    """Return a text block. The block has no field `citations`, because the AI SDK does not accept null there."""
    return {"type": "text", "text": text}


def _tool_use(call_id: str, name: str, value: Any) -> dict[str, Any]:
    block = {"type": "tool_use", "id": f"toolu_{call_id}", "name": name, "input": value}
    return block | {"caller": {"type": "direct"}, "toolset_name": None}


def _object(arguments: str) -> Any:
    """Decode the arguments of a tool call; an empty object if the output ended inside the arguments."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
