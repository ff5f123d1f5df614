"""Reads calls as JSON within a text, with any markup: the common part of several readers.

A subclass knows the markup before and after a call. This module reads the call and separates it from content.
"""

from __future__ import annotations

from bridle.chat.stream_deltas import ANY_CALL, CallRules, Content, StreamDelta
from bridle.chat.tool_parsers.json_call import JsonCallReader


class CallTextReader:
    """Reads text piece by piece. A subclass finds the calls in `_held`, the text that was not parsed yet. `trigger` is
    the markup that begins calls."""

    def __init__(self, trigger: str, rules: CallRules = ANY_CALL) -> None:
        self._trigger, self._rules = trigger, rules
        self._held = ""
        self._call: JsonCallReader | None = None  # the call that is being read
        self._num_calls = 0
        self._is_after_call = False
        self._space = ""  # white space after a call

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        """Return the deltas that are certain after `text`. `is_last` marks the end of the output."""
        pieces: list[StreamDelta] = []
        self._held += text
        while self._in_call(self._call, pieces, is_last) if self._call else self._outside(pieces, is_last):
            pass
        return pieces

    def _outside(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        """Parse text outside of calls. Return whether parsing can continue."""
        raise NotImplementedError

    def _ended(self, call: JsonCallReader, pieces: list[StreamDelta]) -> None:
        """Handle the end of a call, or of text that is not a call (`is_bad`)."""
        raise NotImplementedError

    def _begin(self, rest: str, name: str | None = None) -> bool:
        """Begin to read a call. With `name`, only its arguments follow."""
        end = self._trigger if self._rules.tells_cut else ""
        self._call, self._held = JsonCallReader(self._num_calls, self._rules, name, end=end), rest
        return True

    def _in_call(self, call: JsonCallReader, pieces: list[StreamDelta], is_last: bool) -> bool:
        text, self._held = self._held, ""
        pieces += call.push(text, is_last)
        if not call.is_over:
            return False
        self._call, self._held = None, call.rest
        if not call.is_bad:
            self._num_calls, self._is_after_call, self._space = self._num_calls + 1, True, ""
        self._ended(call, pieces)
        return bool(self._held)

    def _say(self, text: str, pieces: list[StreamDelta]) -> None:
        """Add content. White space after a call is reported only with later text, because it may separate calls."""
        text, self._space = self._space + text, ""
        if self._is_after_call and not text.strip():
            self._space = text
        elif text:
            self._is_after_call = False
            pieces.append(Content(text))
