"""Calls between tags, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, the demo model."""

from __future__ import annotations

from collections.abc import Sequence

from bridle.chat.tools.grammar import Form, Function, json_call, one_of
from bridle.chat.tools.json_call import JsonCallReader
from bridle.chat.tools.pieces import ANY_CALL, CallRules, Content, Piece, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesReader:
    """Reads calls between tags; what turns out not to be a call is content, tags included."""

    def __init__(self, rules: CallRules = ANY_CALL) -> None:
        self._rules = rules
        self._held = ""
        self._call: JsonCallReader | None = None
        self._is_closing = False  # a call is over, its tag is not there yet
        self._num_calls = 0

    def push(self, text: str, is_last: bool = False) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while self._step(pieces, is_last):
            pass
        return pieces

    def _step(self, pieces: list[Piece], is_last: bool) -> bool:
        """Go on with what is held; whether that may lead to more."""
        if self._call is not None:
            return self._in_call(self._call, pieces, is_last)
        if self._is_closing:
            return self._at_close(is_last)
        before, tag, after = self._held.partition(OPEN)
        if not tag:
            keep = 0 if is_last else held_back(before, OPEN)
            self._held = before[len(before) - keep :]
            self._say(before[: len(before) - keep], pieces)
            return False
        self._say(before, pieces)
        self._call, self._held = JsonCallReader(self._num_calls, self._rules), after
        return True

    def _in_call(self, call: JsonCallReader, pieces: list[Piece], is_last: bool) -> bool:
        text, self._held = self._held, ""
        pieces += call.push(text, is_last)
        if not call.is_over:
            return False
        self._call, self._held = None, call.rest
        if call.is_bad:
            pieces.append(Content(OPEN + call.text))
        else:
            self._num_calls += 1
            self._is_closing = True
        return bool(self._held)

    def _at_close(self, is_last: bool) -> bool:
        """Skip white space and the closing tag; anything else is content again."""
        rest = self._held.lstrip()
        if CLOSE.startswith(rest) and rest != CLOSE and not is_last:
            return False  # perhaps the rest of the tag follows
        self._is_closing = False
        self._held = rest.removeprefix(CLOSE) if rest.startswith(CLOSE) else self._held
        return bool(self._held)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """Line breaks between calls are not content."""
        if text and not (self._num_calls and not text.strip()):
            pieces.append(Content(text))


class Hermes:
    """The format, and the grammars of text in it."""

    opening_token: str | None = None
    is_spelled: bool = True

    def reader(self, is_open: bool = False, rules: CallRules = ANY_CALL) -> HermesReader:
        return HermesReader(rules)

    def must_call(self, functions: Sequence[Function], max_calls: int) -> Form:
        """Nothing but calls."""
        more = f' ("\\n" call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
        return Form(f"start: call{more}\n{_call(OPEN, functions)}")

    def may_call(self, functions: Sequence[Function]) -> Form | None:
        """Any text, in which what follows the opening tag is a call."""
        free = f'free[suffix="{OPEN}"]: /(?s:.*)/\nTAIL: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/'
        return Form(f"start: (free call)* TAIL\n{free}\n{_call('', functions)}")


def _call(opening: str, functions: Sequence[Function]) -> str:
    return f'call: "{opening}\\n" one "\\n{CLOSE}"\n' + one_of(functions, lambda each: json_call(each, "arguments"))
