"""Fast functions for masks that allow few of many tokens: almost all 32-bit words of such a mask are zero."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def is_empty(mask: bytes) -> bool:
    """Return whether no bit of the mask is set. Comparing with zeros is many times faster than stripping zeros from
    both ends."""
    return mask == bytes(len(mask))


def few_tokens(mask: bytes, most: int) -> list[int] | None:
    """Return the tokens whose bits are set, in order; None if there are more than `most` of them."""
    if np.count_nonzero(_row(mask)) > most:  # counts words, which is much faster than counting bits
        return None
    tokens = allowed_tokens(mask)
    return tokens if len(tokens) <= most else None


def allowed_tokens(mask: bytes) -> list[int]:
    """Return the tokens whose bits are set, in order."""
    row = _row(mask)
    places = (row != 0).nonzero()[0]
    words = row[places]
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
    width = 8 * words.itemsize
    tokens: list[int] = (places[bits // width] * width + bits % width).tolist()
    return tokens


def _row(mask: bytes) -> NDArray[np.unsignedinteger]:
    return np.frombuffer(mask, np.uint32 if len(mask) % 8 else np.uint64)
