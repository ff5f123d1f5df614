"""Data types for an indexer: the tokens that it reads, and the positions that it selects for attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class IndexRow(NamedTuple):
    """`length` packed tokens of one sequence from `offset` on, the first of them at position `start`. `keep(first,
    keys)` stores the index keys [n, D] of the tokens from `first` on. `keep` also returns all index keys [L, D] of the
    sequence, including the new ones."""

    offset: int
    length: int
    start: int
    keep: Callable[[int, Tensor], Tensor]


@runtime_checkable
class IndexHandler(Protocol):
    """An attention handler that also stores index keys."""

    def index_rows(self, layer: int, num_tokens: int) -> list[IndexRow]:
        """Return the packed tokens of the forward pass, sequence by sequence."""
        ...


class Selected(NamedTuple):
    """Consecutive tokens of a row, from `first` to `end` (exclusive), with the positions [n, K] that each token attends
    to. -1 is padding. `positions` is None if the tokens attend to all positions."""

    first: int
    end: int
    positions: Tensor | None


@dataclass(frozen=True, slots=True)
class Selection:
    """The positions that an indexer selected in a forward pass. Each batch row is a list of pieces."""

    rows: list[list[Selected]]
