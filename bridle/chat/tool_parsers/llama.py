"""Calls as bare JSON, `{"name": ..., "parameters": {...}}`, several with a semicolon between: Llama 3.

The output is calls from its first character on, or it is text: JSON in the middle of a text is no call.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridle.chat.stream_deltas import ANY_CALL, CallRules, Content, StreamDelta
from bridle.chat.tool_parsers.grammar import Form, Function, json_call, one_of
from bridle.chat.tool_parsers.json_call import JsonCallReader

#: Begins a call in some of these models; a special token, which outputs do not show unless asked to.
PYTHON_TAG = "<|python_tag|>"
_BETWEEN = "; \n\t"


class LlamaReader:
    """Reads an output that is calls or text."""

    def __init__(self, rules: CallRules = ANY_CALL) -> None:
        self._rules = rules
        self._held = ""
        self._call: JsonCallReader | None = None
        self._num_calls = 0
        self._is_text = False

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        pieces: list[StreamDelta] = []
        self._held += text
        while self._held or (is_last and self._call is not None):
            if not self._step(pieces, is_last):
                break
        return pieces

    def _step(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        text, self._held = self._held, ""
        if self._is_text:
            pieces.append(Content(text))
            return False
        if self._call is None:
            if not self._opens(text, is_last):
                return bool(self._held) and self._is_text
            text, self._held = self._held, ""
        call = self._call
        assert call is not None
        pieces += call.push(text, is_last)
        if not call.is_over:
            return False
        self._held, self._call = call.text + call.rest, None
        self._is_text = call.is_bad
        self._num_calls += not call.is_bad
        return bool(self._held)

    def _opens(self, text: str, is_last: bool) -> bool:
        """Return whether a call begins; text before it is dropped if it only separates calls."""
        rest = text.lstrip(_BETWEEN if self._num_calls else None).removeprefix(PYTHON_TAG).lstrip()
        if rest.startswith("{"):
            self._call, self._held = JsonCallReader(self._num_calls, self._rules), rest
            return True
        undecided = not rest or (PYTHON_TAG.startswith(rest) and not is_last)
        self._held = "" if undecided and is_last and self._num_calls else text
        self._is_text = not undecided or (is_last and not self._num_calls)
        return False


class Llama:
    """The format, and the grammars of text in it."""

    opening_token: str | None = None
    is_spelled: bool = True

    def reader(self, is_open: bool = False, rules: CallRules = ANY_CALL) -> LlamaReader:
        return LlamaReader(rules)

    def must_call(self, functions: Sequence[Function], max_calls: int) -> Form:
        """Nothing but calls."""
        return Form("start: calls\n" + _calls(functions, max_calls))

    def may_call(self, functions: Sequence[Function]) -> Form | None:
        """Calls, or text that does not begin like one."""
        text = r"TEXT: /\s*([^\s\{](?s:.)*)?/"
        return Form(f"start: calls | TEXT\n{text}\n" + _calls(functions, 16))


def _calls(functions: Sequence[Function], max_calls: int) -> str:
    more = f' ("; " one){{0,{max_calls - 1}}}' if max_calls > 1 else ""
    return f"calls: one{more}\n" + one_of(functions, lambda each: json_call(each, "parameters"))
