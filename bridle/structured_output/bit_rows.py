"""Bit rows of masks that allow few tokens of many: almost all of their words are zero."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: The places of some words of a row, and these.
Words = tuple[NDArray[np.intp], NDArray[np.unsignedinteger]]


def is_empty(mask: bytes) -> bool:
    """Return whether no bit is set. To compare is many times faster than to strip zeros from both ends."""
    return mask == bytes(len(mask))


def filled_words(mask: bytes, most: int) -> Words | None:
    """The places of the words that are not zero, and these; None if there are more than `most`."""
    row = _row(mask)
    return None if np.count_nonzero(row) > most else _filled(row)


def allowed_tokens(mask: bytes) -> list[int]:
    """The tokens whose bits are set, in order."""
    places, words = _filled(_row(mask))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
    width = 8 * words.itemsize
    tokens: list[int] = (places[bits // width] * width + bits % width).tolist()
    return tokens


def _row(mask: bytes) -> NDArray[np.unsignedinteger]:
    return np.frombuffer(mask, np.uint32 if len(mask) % 8 else np.uint64)


def _filled(row: NDArray[np.unsignedinteger]) -> Words:
    places = (row != 0).nonzero()[0]
    return places, row[places]
