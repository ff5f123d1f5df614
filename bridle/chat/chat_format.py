"""How a model writes calls and thoughts, for people to read: `bridle doctor`, and the routes of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from bridle.chat.reasoning import tags_of
from bridle.chat.tool_parsers.formats import described
from bridle.chat.tool_parsers.harmony import harmony_of

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer

_KNOWN: WeakKeyDictionary[Tokenizer, dict[str, Any]] = WeakKeyDictionary()


def chat_format(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The format of tool calls and the tags around reasoning; None for a model without a chat template. Raises
    `InvalidRequest` where the operator names formats that the model cannot have."""
    if not tokenizer.chat_template.is_present:
        return None
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = {"tool_format": described(tokenizer), "reasoning_format": _reasoning(tokenizer)}
    return _KNOWN[tokenizer]


def _reasoning(tokenizer: Tokenizer) -> dict[str, str] | None:
    tags = tags_of(tokenizer)
    if tags is not None:
        return {"opening": tags.opening, "closing": tags.closing}
    return (
        None if harmony_of(tokenizer) is None else {"opening": "<|channel|>analysis<|message|>", "closing": "<|end|>"}
    )


def summary(tokenizer: Tokenizer) -> str:
    """The same in a line; empty for a model without a chat template."""
    found = chat_format(tokenizer)
    if found is None:
        return ""
    calls, reasoning = found["tool_format"], found["reasoning_format"]
    sample = "".join((calls.get("section_open", ""), *calls.get("call", ()), calls.get("section_close", "")))
    written = f" ({' '.join(sample.split())})" if sample else ""
    thoughts = (
        "no reasoning" if reasoning is None else f"reasoning between {reasoning['opening']} and {reasoning['closing']}"
    )
    return f"tool calls in the format {calls['name']}{written}, {thoughts}"
