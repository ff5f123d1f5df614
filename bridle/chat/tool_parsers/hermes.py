"""Calls between tags, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, the demo model."""

from __future__ import annotations

from collections.abc import Sequence

from bridle.chat.stream_deltas import ANY_CALL, CallRules, StreamDelta, ToolReader, held_back
from bridle.chat.tool_parsers.base import CallTextReader
from bridle.chat.tool_parsers.grammar import Form, Function, json_call, one_of
from bridle.chat.tool_parsers.json_call import JsonCallReader
from bridle.chat.tool_parsers.untagged import with_bare_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesReader(CallTextReader):
    """Reads calls between tags; what turns out not to be a call is content, tags included."""

    _is_closing = False  # a call is over, its tag is not there yet

    def _outside(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        if self._is_closing:
            return self._at_close(is_last)
        before, tag, after = self._held.partition(OPEN)
        keep = 0 if tag or is_last else held_back(before, OPEN)
        self._held = before[len(before) - keep :]
        self._say(before[: len(before) - keep], pieces)
        return bool(tag) and self._begin(after)

    def _ended(self, call: JsonCallReader, pieces: list[StreamDelta]) -> None:
        self._is_closing = not call.is_bad
        if call.is_bad:
            self._say(OPEN + call.text, pieces)

    def _at_close(self, is_last: bool) -> bool:
        """Skip white space and the closing tag; anything else is content again."""
        rest = self._held.lstrip()
        if CLOSE.startswith(rest) and rest != CLOSE and not is_last:
            return False  # perhaps the rest of the tag follows
        self._is_closing = False
        self._held = rest.removeprefix(CLOSE) if rest.startswith(CLOSE) else self._held
        return bool(self._held)


class Hermes:
    """The format, and the grammars of text in it. With `bare_calls` an answer may begin with a call without tags."""

    opening_token: str | None = None
    is_spelled: bool = True

    def __init__(self, bare_calls: bool = True) -> None:
        self._bare_calls = bare_calls

    def reader(self, is_open: bool = False, rules: CallRules = ANY_CALL) -> ToolReader:
        inner = HermesReader(rules)
        return with_bare_calls(inner, rules) if self._bare_calls else inner

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
