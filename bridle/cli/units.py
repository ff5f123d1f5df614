"""Parses numbers with units, such as `32k` tokens and `2GiB` of memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cyclopts import Token

from bridle.sampling import drafts_of

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?i?)(b?)", re.IGNORECASE)


def parse_count(text: str) -> int:
    """Parse a count such as `4096`, `25.6k`, `1M` or `32Ki`. Raises `ValueError` for other text, and if the result is
    no whole number."""
    return _parse(text, unit_letter=False)


def parse_bytes(text: str) -> int:
    """Parse a size such as `512MiB`, `2G` or `1000000`. Returns bytes; k, M, G are decimal and Ki, Mi, Gi binary.
    Raises `ValueError`."""
    return _parse(text, unit_letter=True)


def _parse(text: str, *, unit_letter: bool) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (match[3] and not unit_letter):
        example = "512MiB or 2G" if unit_letter else "4096 or 32k"
        raise ValueError(f"{text!r} is not a number such as {example}")
    scale = (_DECIMAL | _BINARY).get(match[2].lower())
    if scale is None:
        raise ValueError(f"{text!r} has an unknown unit; use k, M, G or Ki, Mi, Gi")
    value = float(match[1]) * scale if "." in match[1] else int(match[1]) * scale
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def count(_type: Any, tokens: Sequence[Token]) -> int:
    """Convert the value of a flag for a count, such as `32k`."""
    return parse_count(tokens[0].value)


def drafts(_type: Any, tokens: Sequence[Token]) -> int:
    """Convert the value of a flag for draft tokens: `off`, `auto` or a number."""
    text = tokens[0].value
    found: int = drafts_of(parse_count(text) if text[:1].isdigit() else text)
    return found


def byte_size(_type: Any, tokens: Sequence[Token]) -> int:
    """Convert the value of a flag for a size in memory. Returns bytes."""
    return parse_bytes(tokens[0].value)
