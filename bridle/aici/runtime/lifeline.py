"""What ties a runtime to the engine that started it: the runtime ends when the engine does, at whatever moment.

An engine of ours holds one end of a pipe, our standard input, from before it makes anything in shared memory; a byte
says that all is made. So there is always somebody to remove what is there. Other engines have no pipe: they are looked
for as the parent process, whose number has to be known before it can have ended.
"""

from __future__ import annotations

import os
import select

_STDIN = 0


class Lifeline:
    """`parent` is the number of the process that started this one, `is_piped` says that it holds our standard input.
    With `stays` its end means nothing."""

    def __init__(self, parent: int, *, is_piped: bool = False, stays: bool = False) -> None:
        self._parent = parent
        self._is_piped = is_piped
        self._stays = stays

    def await_word(self) -> bool:
        """Wait until the shared objects are there; False if the engine ended before."""
        return not self._is_piped or bool(os.read(_STDIN, 1))

    def holds(self) -> bool:
        """Whether the engine lives, as far as we are concerned. Safe from any thread."""
        if self._stays:
            return True
        return os.getppid() == self._parent and not (self._is_piped and _has_hung_up())


def _has_hung_up() -> bool:
    poll = select.poll()  # one for each call: it is for a single thread
    poll.register(_STDIN, 0)  # hanging up is always told
    return bool(poll.poll(0))
