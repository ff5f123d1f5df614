"""How much a JSON text would build, counted before a parser builds any of it.

A parser works in one go and lets no other thread run meanwhile: four megabytes of empty lists would stall every stream
of a server for a third of a second. Counting looks at bytes alone, many at once, and lets others run. It need not be
right beyond the place where a text stops being JSON: no parser gets further.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridle.errors import InvalidRequest

#: Whatever a text of so many bytes holds is built in a few milliseconds.
MAX_INLINE_BYTES = 1 << 16
_USUAL_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class JsonSize:
    """`num_nodes` texts, names, lists and objects, each a piece of memory of its own; `num_values` that commas part,
    numbers among them."""

    num_nodes: int
    num_values: int

    def check(self, limit: JsonSize) -> None:
        """Refuse what is larger than `limit` in either."""
        if self.num_nodes > limit.num_nodes:
            raise InvalidRequest(
                f"the JSON holds {self.num_nodes} texts, names, lists and objects; at most {limit.num_nodes} are taken"
            )
        if self.num_values > limit.num_values:
            raise InvalidRequest(f"the JSON holds {self.num_values} values; at most {limit.num_values} are taken")


def limit_for(max_bytes: int) -> JsonSize:
    """What texts of at most `max_bytes` may hold: far more than sensible ones do, and at the usual four megabytes no
    more than a parser builds in some tens of milliseconds."""
    usual = max(max_bytes, _USUAL_BYTES)
    return JsonSize(usual >> 6, usual >> 3)


def json_size(text: bytes) -> JsonSize:
    """What `text` holds."""
    data = np.frombuffer(_without_escapes(text), np.uint8)
    quotes = data == ord('"')
    is_outside = ~np.bitwise_xor.accumulate(quotes)  # (bytes,): also at the quote that ends a string

    def count(char: str) -> int:
        return int(np.count_nonzero(is_outside & (data == ord(char))))

    num_strings = int(np.count_nonzero(quotes)) // 2
    return JsonSize(num_strings + count("[") + count("{"), count(",") + 1)


def _without_escapes(text: bytes) -> bytes:
    """The same length, with nothing escaped. Pairs of backslashes go first, from the left, as a parser reads them."""
    if b"\\" not in text:
        return text
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
