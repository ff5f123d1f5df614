"""Counts how many objects a parser would create for a JSON text, before it creates any of them.

A JSON parser blocks all other threads: four megabytes of empty lists would stall every stream of a server for a third
of a second. Counting only scans bytes and lets other threads run. The count may be wrong after the first syntax error.
A wrong count after an error does not matter, because a parser stops at the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridle.errors import InvalidRequest

#: JSON texts up to this many bytes are parsed in a few milliseconds, whatever their content.
MAX_INLINE_BYTES = 1 << 16
_USUAL_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class JsonSize:
    """`num_nodes` counts strings, names, lists and objects, because a parser allocates memory for each of them.
    `num_values` counts the values between commas, including numbers."""

    num_nodes: int
    num_values: int

    def check(self, limit: JsonSize) -> None:
        """Raise `InvalidRequest` for a text if either of its two counts exceeds `limit`."""
        if self.num_nodes > limit.num_nodes:
            raise InvalidRequest(
                f"the JSON body has {self.num_nodes} texts, names, lists and objects; at most {limit.num_nodes} are "
                "accepted"
            )
        if self.num_values > limit.num_values:
            raise InvalidRequest(f"the JSON body has {self.num_values} values; at most {limit.num_values} are accepted")


def limit_for(max_bytes: int) -> JsonSize:
    """Return the limit for texts of at most `max_bytes` bytes. The limit is far above the counts of normal texts. At
    this limit, a parser takes some tens of milliseconds for a text of four megabytes, which is the usual maximum."""
    usual = max(max_bytes, _USUAL_BYTES)
    return JsonSize(usual >> 6, usual >> 3)


def json_size(text: bytes) -> JsonSize:
    """Count the nodes and values of a JSON text."""
    data = np.frombuffer(_without_escapes(text), np.uint8)
    quotes = data == ord('"')
    is_outside = ~np.bitwise_xor.accumulate(quotes)  # per byte; True also at the quote that ends a string

    def count(char: str) -> int:
        return int(np.count_nonzero(is_outside & (data == ord(char))))

    num_strings = int(np.count_nonzero(quotes)) // 2
    return JsonSize(num_strings + count("[") + count("{"), count(",") + 1)


def _without_escapes(text: bytes) -> bytes:
    """Return a text of the same length in which all escapes are replaced. Pairs of backslashes are replaced first, from
    the left, in the same order as a parser reads them."""
    if b"\\" not in text:
        return text
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
