"""Mistral's calls after a special token: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and the later format
`[TOOL_CALLS]name[ARGS]{...}`.

The token is not text, so outputs must contain special tokens, and this reader drops end tokens. No grammar accepts the
token, either, so the prompt ends with it if a call is required.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridle.chat.stream_deltas import ANY_CALL, CallRules, StreamDelta, ToolReader, held_back
from bridle.chat.tool_parsers.base import CallTextReader
from bridle.chat.tool_parsers.grammar import Form, Function, json_call, one_of
from bridle.chat.tool_parsers.json_call import JsonCallReader
from bridle.chat.tool_parsers.untagged import with_bare_calls

MARK, ARGS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"\s*([\w.\-]{1,256})(?:\[CALL_ID\][\w\-]{0,64})?(?:\[ARGS\])?\s*(?=\{)")


class MistralReader(CallTextReader):
    """Reads calls after the token. With `is_open`, the token is in the prompt."""

    def __init__(self, ends: Sequence[str] = (), is_open: bool = False, rules: CallRules = ANY_CALL) -> None:
        super().__init__(MARK, rules)
        self._ends = tuple(ends)
        self._in_calls = is_open
        self._name = ""  # text before the arguments of the current call

    def _outside(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        if self._in_calls:
            return self._between(is_last)
        before, mark, after = self._held.partition(MARK)
        keep = 0 if mark or is_last else max(held_back(before, each) for each in (MARK, *self._ends))
        self._say(before[: len(before) - keep], pieces)
        self._held = after if mark else before[len(before) - keep :]
        self._in_calls = bool(mark)
        return bool(mark)

    def _ended(self, call: JsonCallReader, pieces: list[StreamDelta]) -> None:
        if call.is_bad:
            self._say(self._name + call.text, pieces)
            self._in_calls = False

    def _between(self, is_last: bool) -> bool:
        """Skip brackets and commas before a call, or read the name before its arguments. Return whether parsing can
        continue."""
        rest = self._held.lstrip(", \n")
        if MARK.startswith(rest) and rest != MARK and not is_last:
            return False  # possibly the token again
        rest = rest.removeprefix(MARK).lstrip("[, \n")
        name = _NAME.match(rest)
        if rest.startswith("{") or name is not None:
            self._name = name[1] if name is not None else ""
            return self._begin(rest[name.end() :], name[1]) if name is not None else self._begin(rest)
        if rest.startswith("]") or (is_last and rest):
            self._in_calls, self._held = False, rest.removeprefix("]")
            return True
        return False

    def _say(self, text: str, pieces: list[StreamDelta]) -> None:
        for end in self._ends:
            text = text.replace(end, "")
        super()._say(text, pieces)


class Mistral:
    """Mistral's format, and its grammars. `ends` are special tokens that may end an output. Grammars do not write the
    later format, which has a token between name and arguments."""

    opening_token: str | None = MARK

    def __init__(self, ends: Sequence[str] = (), is_spelled: bool = True, bare_calls: bool = True) -> None:
        self._ends = tuple(ends)
        self.is_spelled = is_spelled
        self._bare_calls = bare_calls

    def reader(self, is_open: bool = False, rules: CallRules = ANY_CALL) -> ToolReader:
        inner = MistralReader(self._ends, is_open, rules)
        return with_bare_calls(inner, rules) if self._bare_calls and not is_open else inner

    def must_call(self, functions: Sequence[Function], max_calls: int) -> Form:
        """Return the grammar of the list of calls after the token."""
        more = f' (", " one){{0,{max_calls - 1}}}' if max_calls > 1 else ""
        return Form(f'start: "[" one{more} "]"\n' + one_of(functions, lambda each: json_call(each, "arguments")))

    def may_call(self, functions: Sequence[Function]) -> Form | None:
        """Return None, because the model decides to call by a token that no grammar contains."""
        return None
