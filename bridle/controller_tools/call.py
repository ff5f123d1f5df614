"""A tool call as its controller sees it: the controller gets a handle at once, and the answer later.

A call ends once, with a text or with an error message; only the first end counts. This module does not know the tools.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from bridle.errors import ToolFailed
from bridle.safe_repr import short_repr

_PENDING = "has not answered yet"


class Call:
    """One call of the tool `name`. Safe from any thread. Copying a call returns the call itself, so that a forked
    controller waits for the same answer.

    `is_done` is true once the call has ended; `error` is then None or the reason why there is no answer. `text` is the
    answer, and `value` is the answer parsed as JSON; both raise `ToolFailed` if there is no answer.
    """

    __slots__ = ("_answer", "_error", "_lock", "_on_done", "is_done", "name", "notice", "num_owners")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_done = False
        self.num_owners = 1  # outputs that may still need the answer
        # the variable that asks the client for an answer, if it must answer
        self.notice: tuple[str, bytes] | None = None
        self._answer = ""
        self._error: str | None = _PENDING
        self._lock = threading.Lock()
        self._on_done: list[Callable[[], None]] = []

    @classmethod
    def of(cls, name: Any) -> Call:
        """Return a call with a printable name: the controller that named the tool may have given any value."""
        return cls(short_repr(name)[1:-1] if isinstance(name, str) else "?")

    @property
    def error(self) -> str | None:
        """Return the reason why there is no answer; None if there is an answer, or if the call has not ended."""
        return self._error if self.is_done else None

    @property
    def text(self) -> str:
        """Return the answer. Raises `ToolFailed` if there is no answer."""
        if not self.is_done or self._error is not None:
            raise ToolFailed(f"tool {self.name!r}: {self._error}")
        return self._answer

    @property
    def value(self) -> Any:
        """Return the answer parsed as JSON. Raises `ToolFailed` if there is no answer, or if the answer is not JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise ToolFailed(f"tool {self.name!r}: the answer is not JSON: {error}") from None

    def cancel(self) -> None:
        """Cancel the call: it is done at once, and its execution is stopped. Has no effect on a call that is already
        done."""
        self.end(error="was cancelled")

    def end(self, answer: str = "", error: str | None = None) -> bool:
        """End the call, unless it is already done. Returns whether this end was the first."""
        with self._lock:
            if self.is_done:
                return False
            self._answer, self._error = answer, error
            self.is_done = True
            told, self._on_done = self._on_done, []
        for tell in told:
            tell()
        return True

    def when_done(self, tell: Callable[[], None]) -> None:
        """Call `tell` once this call is done, from the thread that ends it. If it is done already, call `tell` now."""
        with self._lock:
            if not self.is_done:
                self._on_done.append(tell)
                return
        tell()

    def __copy__(self) -> Call:
        return self

    def __deepcopy__(self, memo: object) -> Call:
        return self

    def __repr__(self) -> str:
        how = "pending" if not self.is_done else "answered" if self._error is None else self._error
        return f"Call({self.name!r}: {how})"
