"""Common prefixes and suffixes of two renderings of a template, cut at the borders of tags."""

from __future__ import annotations

import re
from os.path import commonprefix


def common_prefix(first: str, second: str) -> str:
    return commonprefix((first, second))  # noqa: RUF071 - of texts, not of paths


def common_suffix(first: str, second: str) -> str:
    return common_prefix(first[::-1], second[::-1])[::-1]


def trimmed_opening(text: str) -> str:
    """Return a common suffix without the end of the tag before it: `\\n<parameter=` of `>\\n<parameter=`."""
    cut = re.match(r"""[^<\[{\s\]]*[>)}"',]+(?=\s*(?:[<\[{]|\]<))""", text)
    return text[cut.end() :] if cut else text


def whole_tags(closing: str, end: str, rest: str) -> tuple[str, str]:
    """Return a common prefix without an incomplete tag at its end, and `rest`."""
    cut = closing.rfind("<")
    if cut >= 0 and ">" not in closing[cut:] and (len(closing) < len(end) and len(closing) < len(rest)):
        closing = closing[:cut]
    return closing, rest
