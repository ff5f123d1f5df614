"""Calls as JSON within a text, whatever marks them: what the readers of several formats have in common.

A format says where a call begins and what follows one; reading the call and telling content apart happens here.
"""

from __future__ import annotations

from bridle.chat.tools.json_call import JsonCallReader
from bridle.chat.tools.pieces import ANY_CALL, CallRules, Content, Piece


class CallTextReader:
    """Reads text piece by piece. A subclass finds the calls in `_held`, the text that nobody has read yet."""

    def __init__(self, rules: CallRules = ANY_CALL) -> None:
        self._rules = rules
        self._held = ""
        self._call: JsonCallReader | None = None  # the one that is being read
        self._num_calls = 0

    def push(self, text: str, is_last: bool = False) -> list[Piece]:
        """What became certain with `text`; with `is_last` nothing follows."""
        pieces: list[Piece] = []
        self._held += text
        while self._in_call(self._call, pieces, is_last) if self._call else self._outside(pieces, is_last):
            pass
        return pieces

    def _outside(self, pieces: list[Piece], is_last: bool) -> bool:
        """Go on where no call is being read; whether that may lead to more."""
        raise NotImplementedError

    def _ended(self, call: JsonCallReader, pieces: list[Piece]) -> None:
        """A call is over, or turned out to be none (`is_bad`)."""
        raise NotImplementedError

    def _begin(self, rest: str, name: str | None = None) -> bool:
        """What follows is a call; with `name` only its arguments."""
        self._call, self._held = JsonCallReader(self._num_calls, self._rules, name), rest
        return True

    def _in_call(self, call: JsonCallReader, pieces: list[Piece], is_last: bool) -> bool:
        text, self._held = self._held, ""
        pieces += call.push(text, is_last)
        if not call.is_over:
            return False
        self._call, self._held = None, call.rest
        self._num_calls += not call.is_bad
        self._ended(call, pieces)
        return bool(self._held)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """Content, but for white space after a call: it separates calls."""
        if text and not (self._num_calls and not text.strip()):
            pieces.append(Content(text))
