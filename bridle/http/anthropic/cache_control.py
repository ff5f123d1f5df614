"""Reads the breakpoints of `cache_control`: they say how much of a prompt's KV is retained, and for how long.

Each breakpoint becomes a shortened request body that ends at the breakpoint, plus a character that no prompt has. The
server retains the KV of the prefix that the shortened prompt and the full prompt have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridle.errors import InvalidRequest
from bridle.http.anthropic.schemas import MessagesBody
from bridle.safe_repr import short_repr

#: The maximum number of breakpoints, as in Anthropic's API.
MAX_BREAKPOINTS = 4
SHORT_SECONDS = 300.0
_SECONDS = {"5m": SHORT_SECONDS, "1h": 3_600.0}
_MARK = {"type": "text", "text": "\ue000"}
_ASK: dict[str, Any] = {"role": "user", "content": [_MARK]}

Changes = dict[str, Any]


def breakpoints(body: MessagesBody) -> list[tuple[MessagesBody, float]]:
    """Return a shortened body and its lifetime in seconds, for each lifetime that breakpoints have. The body ends at
    the last breakpoint with this lifetime. Raises `InvalidRequest` that names the invalid block."""
    last: dict[float, Changes] = {}
    for number, (where, control, changes) in enumerate(_marked(body)):
        if number >= MAX_BREAKPOINTS:
            raise InvalidRequest(f"cache_control: got more than {MAX_BREAKPOINTS} breakpoints; remove {where}", where)
        last[_seconds(control, where)] = changes
    return [(body.model_copy(update={"cache_control": None} | changes), seconds) for seconds, changes in last.items()]


def _seconds(control: Any, where: str) -> float:
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        got = short_repr(control.get("type") if isinstance(control, Mapping) else control)
        raise InvalidRequest(f"{where}: got type {got}; it must be 'ephemeral'", where)
    ttl = control.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in _SECONDS:
        raise InvalidRequest(f"{where}.ttl: got {short_repr(ttl)}; it must be '5m' or '1h'", where)
    return _SECONDS[ttl]


def _marked(body: MessagesBody) -> Iterator[tuple[str, Any, Changes]]:
    """Yield the breakpoints in the order of the prompt: the path of the field, its value, and the changed fields of the
    shortened body."""
    for i, tool in enumerate(body.tools or ()):
        if tool.get("cache_control") is not None:
            tools = (body.tools or [])[: i + 1]
            yield f"tools[{i}].cache_control", tool["cache_control"], {"tools": tools, "messages": [_ASK]}
    for i, block in enumerate(body.system if isinstance(body.system, list) else ()):
        if block.get("cache_control") is not None:
            system = [*(body.system or ())[: i + 1], _MARK]
            yield f"system[{i}].cache_control", block["cache_control"], {"system": system, "messages": [_ASK]}
    for i, message in enumerate(body.messages):
        content = message.get("content")
        for j, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, dict) and block.get("cache_control") is not None:
                yield f"messages[{i}].content[{j}].cache_control", block["cache_control"], _cut(body, i, j + 1)
    if body.cache_control is not None and body.messages:
        yield "cache_control", body.cache_control, _cut(body, len(body.messages) - 1, None)


def _cut(body: MessagesBody, i: int, num_blocks: int | None) -> Changes:
    """Return the changed fields of a body that ends in message `i`, after its first `num_blocks` blocks (None: after
    all)."""
    message = body.messages[i]
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kept = blocks[:num_blocks] if isinstance(blocks, list) else []
    if message.get("role") == "assistant":
        return {"messages": [*body.messages[:i], {**message, "content": kept}, _ASK]}
    return {"messages": [*body.messages[:i], {**message, "content": [*kept, _MARK]}]}
