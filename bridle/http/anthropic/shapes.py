"""A turn in Anthropic's shapes: whole, as a list of blocks, or streamed, as events that open, fill and close blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from bridle.chat.tools.pieces import CallArguments, CallBegun, Content, Piece, Thought
from bridle.http.openai.shapes import usage_shape
from bridle.outputs import ChatMessage, CompletionOutput, FinishReason, Usage

Event = dict[str, Any]


def blocks(found: ChatMessage) -> list[dict[str, Any]]:
    """The blocks of a whole answer."""
    made: list[dict[str, Any]] = []
    if found.thoughts:
        made.append({"type": "thinking", "thinking": found.thoughts, "signature": ""})
    if found.content or not (found.calls or found.thoughts):
        made.append({"type": "text", "text": found.content})
    return made + [_tool_use(call.id, call.name, _object(call.arguments)) for call in found.calls]


def stop_fields(output: CompletionOutput, has_calls: bool) -> dict[str, Any]:
    """Why the answer ended."""
    if output.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def usage_fields(usage: Usage, num_thinking: int) -> dict[str, Any]:
    """Anthropic's counts, in which cached tokens are no input tokens; the exact ones are in the details."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": num_thinking}
        | usage_shape(usage, num_thinking)["completion_tokens_details"],
    }


class BlockWriter:
    """Turns pieces of an answer into events. One block is open at a time."""

    def __init__(self) -> None:
        self._number = -1
        self._kind: str | None = None

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """The events for these pieces."""
        return [event for piece in pieces for event in self._of(piece)]

    def close(self) -> list[Event]:
        """The events that end the last block. An answer without any block gets an empty one."""
        return (
            self._close() if self._number >= 0 else [*self._open("text", {"type": "text", "text": ""}), *self._close()]
        )

    def _of(self, piece: Piece) -> list[Event]:
        match piece:
            case Thought():
                opened = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return [*opened, self._delta({"type": "thinking_delta", "thinking": piece.text})]
            case Content():
                opened = self._open("text", {"type": "text", "text": ""})
                return [*opened, self._delta({"type": "text_delta", "text": piece.text})]
            case CallBegun():
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


def _tool_use(call_id: str, name: str, value: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call_id}", "name": name, "input": value}


def _object(arguments: str) -> Any:
    """The arguments of a call; an empty object if the output ended within them."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
