"""Where a turn ends because a model makes the same call again: a small model may repeat one for ever.

A call is repeated if its text is that of an earlier call of the same output, markup, name and arguments. Only formats
with tags around each call say where a call ends; others are bounded by the number of tokens alone.
"""

from __future__ import annotations

import re

from bridle.chat.reasoning import ThinkTags
from bridle.chat.tool_parsers.call_format import FIELDS
from bridle.chat.tool_parsers.formats import InferredFormat, ToolFormat
from bridle.engine.request import RepeatMarks

#: A text that no arguments have by chance, as `}` or `)` would be.
_TAG = re.compile(r"[<\[|｜][^{}]*\w[^{}]*[>\]|｜]")


def marks_of(kind: ToolFormat, tags: ThinkTags | None) -> RepeatMarks | None:
    """Return what is around each call; None if the format does not say. Calls in thoughts are none."""
    around = _around(kind)
    return None if around is None else RepeatMarks(*around, "" if tags is None else tags.closing)


def _around(kind: ToolFormat) -> tuple[str, str] | None:
    if not isinstance(kind, InferredFormat):
        return None
    first, last = kind.form.call[0], kind.form.call[-1].strip()
    if first in FIELDS or not first.strip() or not _TAG.search(last):
        return None
    return first.strip(), last
