"""The text of one output: finds stop strings, and holds text back that might still become one.

It sits between the detokenizer (`TextState`) and the events. Text that could be the beginning of a stop string is held
until the next tokens decide. A rewind takes back held text first, and reports how much of the released text disappears.
This module knows nothing of wire formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bridle.engine.interfaces import TextState


class Released(NamedTuple):
    """The effect of one token on the text: `text` is released now, `stop` is the stop string that it completes.

    `num_taken` counts characters released earlier that turn out to belong to the stop string. This is possible only
    after a rewind changed the text that follows them.
    """

    text: str
    stop: str | None = None
    num_taken: int = 0


class OutputText:
    """Growing text of one output, token by token."""

    def __init__(self, state: TextState, stop: Sequence[str], include_stop: bool) -> None:
        self._state = state
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._window = max((len(text) for text in stop), default=0)
        self._pieces: list[str] = []  # characters that became certain with each token
        self._num_chars = 0
        self._num_released = 0
        self._is_closed = False  # a stop string ended it

    def push(self, token: int) -> Released:
        """Append a token."""
        piece = self._state.push(token)
        self._pieces.append(piece)
        self._num_chars += len(piece)
        if not self._stop:
            self._num_released = self._num_chars
            return Released(piece)
        return self._release(len(piece))

    def rewind(self, num_tokens: int, num_unsent: int = 0) -> int:
        """Take tokens back; returns the number of released characters that disappear.

        The last `num_unsent` released characters never left the engine; those among them that stay are held again.
        """
        if num_tokens == 0:
            return 0
        self._num_chars -= self._state.rewind(num_tokens)
        del self._pieces[-num_tokens:]
        visible = self._num_released - num_unsent
        self._num_released = min(visible, self._num_chars)
        return visible - self._num_released

    def flush(self) -> str:
        """End the output; returns the text that was still held, or nothing if a stop string ended it."""
        if self._is_closed:
            return ""
        tail = self._state.flush()
        if tail:
            self._pieces.append(tail)
            self._num_chars += len(tail)
        held = self._tail(self._num_chars - self._num_released)
        self._num_released = self._num_chars
        return held

    def released_text(self) -> str:
        """All text released so far."""
        return "".join(self._pieces)[: self._num_released]

    def copy(self) -> OutputText:
        """An independent copy, for a fork."""
        twin = OutputText(self._state.copy(), self._stop, self._include_stop)
        twin._pieces = self._pieces.copy()
        twin._num_chars = self._num_chars
        twin._num_released = self._num_released
        return twin

    def _release(self, num_new: int) -> Released:
        held = self._num_chars - self._num_released
        tail = self._tail(max(held, num_new + self._window - 1))
        base = self._num_chars - len(tail)  # position in the text of tail[0]
        match = self._find_stop(tail, len(tail) - num_new)
        if match is not None:
            start, stop = match
            return self._cut(tail, base, start + (len(stop) if self._include_stop else 0), stop)
        end = len(tail) - self._partial_match(tail)
        start = self._num_released - base
        if end <= start:
            return Released("")
        self._num_released = base + end
        return Released(tail[start:end])

    def _cut(self, tail: str, base: int, end: int, stop: str) -> Released:
        """End the text `end` characters into `tail`."""
        start = self._num_released - base
        self._num_chars = self._num_released = base + end
        self._is_closed = True
        return Released(tail[start:end], stop, max(start - end, 0))

    def _find_stop(self, tail: str, new_from: int) -> tuple[int, str] | None:
        """Find the stop string that begins first among those that end in the new text."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            start = tail.find(stop, max(new_from - len(stop) + 1, 0))
            if start >= 0 and (found is None or start < found[0]):
                found = (start, stop)
        return found

    def _partial_match(self, tail: str) -> int:
        """Length of the longest end of `tail` that begins a stop string."""
        best = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(tail)), best, -1):
                if tail.endswith(stop[:length]):
                    best = length
                    break
        return best

    def _tail(self, num_chars: int) -> str:
        """The last `num_chars` characters (fewer if there are not as many)."""
        if num_chars <= 0:
            return ""
        parts: list[str] = []
        missing = num_chars
        for piece in reversed(self._pieces):
            parts.append(piece)
            missing -= len(piece)
            if missing <= 0:
                break
        return "".join(reversed(parts))[-num_chars:]
