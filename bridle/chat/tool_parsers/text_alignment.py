"""Common parts of two renderings of a template, cut where tags begin and end."""

from __future__ import annotations

import re
from os.path import commonprefix


def common_prefix(first: str, second: str) -> str:
    return commonprefix((first, second))  # noqa: RUF071 - of texts, not of paths


def common_suffix(first: str, second: str) -> str:
    return common_prefix(first[::-1], second[::-1])[::-1]


def trimmed_opening(text: str) -> str:
    """A common suffix without the end of the tag before it: `\\n<parameter=` of `>\\n<parameter=`."""
    cut = re.match(r"""[^<\[{\s\]]*[>)}"',]+(?=\s*(?:[<\[{]|\]<))""", text)
    return text[cut.end() :] if cut else text


def whole_tags(closing: str, end: str, rest: str) -> tuple[str, str]:
    """A common prefix without half a tag at its end."""
    cut = closing.rfind("<")
    if cut >= 0 and ">" not in closing[cut:] and (len(closing) < len(end) and len(closing) < len(rest)):
        closing = closing[:cut]
    return closing, rest
