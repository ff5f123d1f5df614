"""Reads columns of an untrusted message: splits a flat list into the parts of batch rows, and checks lengths and
indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import TypeVar

from bridle.errors import ProtocolError

T = TypeVar("T")


def shares(values: Iterable[T], counts: Sequence[int], what: str) -> list[tuple[T, ...]]:
    """Split `values` into one part per batch row; `counts` are the parts' lengths. Raises `ProtocolError` if the sum of
    `counts` is not the number of values."""
    flat = tuple(values)
    if sum(counts) != len(flat):
        raise ProtocolError(
            f"{what}: the batch rows need {sum(counts)} entries in all, but the message has {len(flat)}"
        )
    cut, position = [], 0
    for count in counts:
        cut.append(flat[position : position + count])
        position += count
    return cut


def check_lengths(what: str, num_rows: int, *columns: Sized) -> None:
    """Raise `ProtocolError` unless every column has one entry per batch row."""
    for column in columns:
        if len(column) != num_rows:
            raise ProtocolError(f"{what}: a list in the message has {len(column)} entries for {num_rows} batch rows")


def item(values: Sequence[T], index: int, what: str) -> T:
    """Return `values[index]`. Raises `ProtocolError` if the index is out of range."""
    if not 0 <= index < len(values):
        raise ProtocolError(f"{what}: the message refers to entry {index}, but there are {len(values)} entries")
    return values[index]
