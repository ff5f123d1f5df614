"""Tokens that an indexer reads, and positions that it selects for attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class IndexRow(NamedTuple):
    """`length` packed tokens of one sequence from `offset` on, the first of them at position `start`. `keep(first,
    keys)` stores the index keys [n, D] of the tokens from `first` on. It returns the keys [L, D] of all tokens up to
    the last of them."""

    offset: int
    length: int
    start: int
    keep: Callable[[int, Tensor], Tensor]


@runtime_checkable
class IndexHandler(Protocol):
    """A handler of forward passes that also keeps index keys."""

    def index_rows(self, layer: int, num_tokens: int) -> list[IndexRow]:
        """Return the packed tokens of the pass, sequence by sequence."""
        ...


class Selected(NamedTuple):
    """Consecutive tokens of a row, and the positions [n, K] that each selects, where -1 means none. The positions are
    None if the tokens select all positions."""

    first: int
    end: int
    positions: Tensor | None


@dataclass(frozen=True, slots=True)
class Selection:
    """Selections of an indexer in a pass: the pieces of each row."""

    rows: list[list[Selected]]
