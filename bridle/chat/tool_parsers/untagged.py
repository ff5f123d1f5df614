"""Calls without their tags, which small models write: the answer begins with `{"name": "f", ...}`, often in a fence.

Only a call of a function that is offered counts, and only at the beginning of an answer: JSON further on may be what
was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCES = ("", "```json", "```")
#: Qwen 2.5's template shows calls in double braces, and models repeat them.
_BRACES = ("{", "{{")
_AFTER = re.compile(r"[\s}]*(?:```)?\s*")
_LONGEST_AFTER = 64


def where_call_begins(text: str, names: Collection[str], is_last: bool = False) -> int | None:
    """Return the position in `text` at which the object of a call begins: -1 if there is none, None if not yet
    known."""
    compact = "".join(text.split())
    heads = [f'{fence}{brace}"name":"{name}"' for name in names for fence in _FENCES for brace in _BRACES]
    if any(map(compact.startswith, heads)):
        return text.rindex("{", 0, text.index('"'))
    return None if not is_last and any(head.startswith(compact) for head in heads) else -1


def without_end(text: str, is_last: bool) -> str | None:
    """`text`, which follows such a call, without surplus braces and the end of a fence; None if more of them may
    come."""
    found = _AFTER.match(text)
    assert found is not None
    rest = text[found.end() :]
    is_open = "```".startswith(rest) and len(text) < _LONGEST_AFTER
    return None if is_open and not is_last else rest
