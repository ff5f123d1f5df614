"""Converts request items to chat messages. Reasoning, text and tool calls of one answer become one message. Errors name
the invalid item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridle.chat.files import address_of, check_count, file_text, is_file
from bridle.chat.stream_deltas import own_id
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.openai.responses.summaries import unpacked
from bridle.http.openai.responses.tools import flat_name
from bridle.http.openai.schemas import JsonObjects
from bridle.safe_repr import short_repr
from bridle.tokenizer.chat_template import check_role

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_MEDIA = ("input_image", "input_audio")
#: The phases of an assistant's message: a comment before the answer, or the answer.
PHASES = ("commentary", "final_answer")


def messages_of(
    instructions: str | None, items: str | JsonObjects, has_media: bool, template: str | None = None
) -> JsonObjects:
    """Convert items to chat messages. If `has_media`, images and audio stay in the messages. A role must be a standard
    role, or occur in `template`, the source of the chat template. Raises `InvalidRequest`, and `UnsupportedFeature` for
    unsupported item types."""
    messages: JsonObjects = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    reader = _ItemReader(messages, has_media, template)
    for position, item in enumerate(items):
        reader.add(item, f"input[{position}]")
    return messages


def as_item(item: dict[str, Any]) -> dict[str, Any]:
    """Complete an item: add a missing type and status, and convert its content to a list of parts."""
    listed: dict[str, Any] = {"type": "message", "status": "completed"}
    listed |= {name: value for name, value in item.items() if value is not None}
    if listed["type"] == "message" and isinstance(listed.get("content"), str):
        kind = "output_text" if listed.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": listed["content"]}]
    return listed


def check_items(before: JsonObjects, items: JsonObjects) -> None:
    """Raise an error, as `messages_of` does, for the first item in `items` that cannot follow the items in `before`."""
    reader = _ItemReader([], has_media=True)
    for position, item in enumerate(before):
        reader.add(item, f"item {position} of the conversation")
    for position, item in enumerate(items):
        reader.add(item, f"items[{position}]")


class _ItemReader:
    """Converts items to chat messages, and appends them to `messages`."""

    def __init__(self, messages: JsonObjects, has_media: bool, template: str | None = None) -> None:
        self._messages, self._has_media, self._template = messages, has_media, template
        self._calls: set[object] = set()
        self._num_files = 0
        self._is_after_message = False

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message")
        match kind:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                thoughts = self._text(item.get("content") or item.get("summary") or "", where)
                turn = self._turn()
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                self._add_result(item, where)
            case "compaction" | "compaction_summary":
                self._turn()["content"] += unpacked(item.get("encrypted_content"), where)
            case _:
                raise UnsupportedFeature(f"{where} is of type {short_repr(kind)}", where)
        self._is_after_message = kind == "message"

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role, phase = item.get("role"), item.get("phase")
        if not isinstance(role, str):
            raise InvalidRequest(
                f"{where}.role is {short_repr(role)}; must be user, assistant, system or developer", where
            )
        check_role(role, self._template, where)
        if phase is not None and phase not in PHASES:
            raise InvalidRequest(f"{where}.phase is {short_repr(phase)}; must be {' or '.join(PHASES)}", where)
        if role != "assistant":
            self._messages.append({"role": role, "content": self._content(item.get("content"), f"{where}.content")})
            return
        turn = self._turn()
        between = "\n" if turn["content"] and self._is_after_message else ""
        turn["content"] += between + self._text(item.get("content"), f"{where}.content")

    def _add_call(self, item: Mapping[str, Any], where: str) -> None:
        if not isinstance(item.get("name"), str):
            raise InvalidRequest(
                f"{where}.name is {short_repr(item.get('name'))}; must be the name of a function", where
            )
        name = flat_name(item["name"], item.get("namespace"))
        function = {"name": name, "arguments": item.get("arguments") or "{}"}
        call = {"id": own_id(item.get("call_id")), "type": "function", "function": function}
        self._calls.add(str(call["id"]))
        self._turn().setdefault("tool_calls", []).append(call)

    def _add_result(self, item: Mapping[str, Any], where: str) -> None:
        call_id = own_id(item.get("call_id"))
        if str(call_id) not in self._calls:
            raise InvalidRequest(
                f"{where}.call_id is {short_repr(item.get('call_id'))}; no earlier function_call has that call_id",
                where,
            )
        result = self._content(item.get("output"), f"{where}.output")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": result})

    def _turn(self) -> dict[str, Any]:
        """Return the assistant's message that is being built."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]

    def _content(self, content: Any, where: str) -> str | JsonObjects:
        """Return the text of content parts. If some parts are images, audio or file URLs, return all parts in order."""
        if not isinstance(content, list) or not any(self._stays(part) for part in content):
            return self._text(content, where)
        return [
            part if self._stays(part) else {"type": "text", "text": self._text([part], f"{where}[{position}]")}
            for position, part in enumerate(content)
        ]

    def _stays(self, part: Any) -> bool:
        if is_file(part):
            return address_of(part) is not None
        return self._has_media and isinstance(part, dict) and part.get("type") in _MEDIA

    def _text(self, content: Any, where: str) -> str:
        if isinstance(content, str):
            return content
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise InvalidRequest(f"{where} must be text or a list of parts", where)
        return "\n".join(self._part_text(part, f"{where}[{position}]") for position, part in enumerate(content))

    def _part_text(self, part: Mapping[str, Any], where: str) -> str:
        if is_file(part):
            self._num_files += 1
            check_count(self._num_files, "input")
            return file_text(part, where)
        if part.get("type") not in _TEXTS:
            raise UnsupportedFeature(f"{where} is of type {short_repr(part.get('type'))}", where)
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{where} has no text", where)
        return text
