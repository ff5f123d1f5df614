"""Results that are computed again when they are needed again: a dictionary that cannot grow without end."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
#: The text of a grammar, and the tokens that came: all that masks depend on.
State = tuple[str, tuple[int, ...]]


class Remembered(dict[K, V]):
    """A dictionary of at most `most` entries. Before it would hold more, it forgets all of them. Several threads may
    use it, since each operation is atomic."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._most and key not in self:
            self.clear()
        super().__setitem__(key, value)
