"""A cache of limited size, for results that can be computed again."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
#: The text of a grammar and the committed tokens: together these determine the mask.
State = tuple[str, tuple[int, ...]]


class Remembered(dict[K, V]):
    """A dictionary of at most `most` entries. Before it would exceed this number, it drops all entries. Safe from
    several threads, because each operation is atomic."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._most and key not in self:
            self.clear()
        super().__setitem__(key, value)
