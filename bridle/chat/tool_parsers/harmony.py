"""Messages in channels, as gpt-oss writes them: analysis is reasoning, final is the answer, and commentary contains
calls.

An output is a sequence of messages: `<|channel|>NAME<|message|>text<|end|>`, and each message but the first follows
`<|start|>assistant`. A message to `functions.NAME` is a call. The marks are special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bridle.chat.stream_deltas import ANY_CALL, CallRules, Content, StreamDelta, Thought, held_back
from bridle.chat.tool_parsers.grammar import Form, Function, arguments, one_of, quoted
from bridle.chat.tool_parsers.json_call import JsonCallReader

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL, RETURN, START)
_MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL)
_TO_FUNCTION = re.compile(r"to=functions\.([\w.\-]{1,256})")
_HEAD = re.compile(r"\s*(?:<\|start\|>|<\|channel\|>|assistant|to=)")
_BEGINNINGS = (START, CHANNEL, "assistant", "to=")
_MAX_HEAD = 512


class HarmonyReader:
    """Reads messages in channels. Text before any mark is content."""

    def __init__(self, rules: CallRules = ANY_CALL, tells_thoughts: bool = True) -> None:
        self._rules, self._tells_thoughts = rules, tells_thoughts
        self._held = ""
        self._head: str | None = None  # header of the current message; None before it is complete
        self._call: JsonCallReader | None = None
        self._num_calls = 0

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        """Return the deltas that are certain after `text`. With `is_last`, no more text follows."""
        self._held += text
        pieces: list[StreamDelta] = []
        while self._in_head(pieces, is_last) if self._head is None else self._in_body(pieces, is_last):
            pass
        return pieces

    def _in_head(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        head, mark, rest = self._held.partition(MESSAGE)
        is_head = bool(mark) and len(head) < _MAX_HEAD and bool(_HEAD.match(head))
        if not mark and self._may_be_head() and not is_last:
            return False
        if not is_head:
            # Plain text. A mark that begins no message is dropped, because it would end this message before it begins.
            self._head, self._held = "", self._held.removeprefix(START)
            return bool(self._held) and self._in_body(pieces, is_last)
        self._head, self._held = head, rest
        function = _TO_FUNCTION.search(head)
        if function is not None:
            self._call = JsonCallReader(self._num_calls, self._rules, function[1])
        return True

    def _may_be_head(self) -> bool:
        text = self._held.lstrip()
        return len(text) < _MAX_HEAD + len(MESSAGE) and (
            bool(_HEAD.match(text)) or any(beginning.startswith(text) for beginning in _BEGINNINGS)
        )

    def _in_body(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        text, end = self._until_end(is_last)
        if self._call is not None:
            self._read_call(self._call, text, pieces, is_last=bool(end) or is_last)
        elif text:
            is_thought = self._tells_thoughts and "analysis" in (self._head or "")
            pieces.append(Thought(text) if is_thought else Content(text))
        if end:
            if "analysis" in (self._head or "") and not self._tells_thoughts:
                pieces.append(Content("\n\n"))
            self._head, self._call = None, None
            self._held = self._held.removeprefix(end) if end != START else self._held
        return bool(end) and bool(self._held)

    def _until_end(self, is_last: bool) -> tuple[str, str]:
        """Return the text up to the mark that ends the message, and that mark; the mark is empty if it has not
        arrived."""
        found = min(((place, mark) for mark in _ENDS if (place := self._held.find(mark)) >= 0), default=None)
        if found is not None:
            text, self._held = self._held[: found[0]], self._held[found[0] :]
            return text, found[1]
        keep = 0 if is_last else max(held_back(self._held, mark) for mark in _ENDS)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, ""

    def _read_call(self, call: JsonCallReader, text: str, pieces: list[StreamDelta], is_last: bool) -> None:
        was_over = call.is_over
        if was_over:
            return
        pieces += call.push(text, is_last)
        if call.is_over and call.is_bad:
            pieces.append(Content(call.text))
        elif call.is_over:
            self._num_calls += 1


class Harmony:
    """The format of messages in channels, and its grammars. `specials` maps the marks to their tokens. Without
    `tells_thoughts`, analysis is content."""

    opening_token: str | None = None
    is_spelled: bool = True

    def __init__(self, specials: Mapping[str, int], tells_thoughts: bool = True) -> None:
        self._tells_thoughts = tells_thoughts
        self._tokens = {mark: f"<[{token}]>" for mark, token in specials.items()}

    def reader(self, is_open: bool = False, rules: CallRules = ANY_CALL) -> HarmonyReader:
        return HarmonyReader(rules, self._tells_thoughts)

    def must_call(self, functions: Sequence[Function], max_calls: int) -> Form:
        """Return the grammar of an output with a call after any reasoning. One call suffices, because the model ends
        its turn with it."""
        return self._form(f"start: thought* {self._tokens[CHANNEL]} one", functions)

    def may_call(self, functions: Sequence[Function]) -> Form | None:
        """Return the grammar of an output with reasoning and preambles, then an answer or a call."""
        final = f'"final" {self._tokens[MESSAGE]} TEXT'
        return self._form(f"start: thought* {self._tokens[CHANNEL]} (one | {final})", functions)

    def _form(self, start: str, functions: Sequence[Function]) -> Form:
        mark = self._tokens
        thought = (
            f'thought: {mark[CHANNEL]} ("analysis" | "commentary") {mark[MESSAGE]} TEXT {mark[END]} {mark[START]} '
            '"assistant"'
        )
        return Form("\n".join([start, thought, "TEXT: /(?s:.*)/", one_of(functions, self._call)]), has_tokens=True)

    def _call(self, function: Function) -> str:
        mark, head = self._tokens, quoted(f"commentary to=functions.{function.name} ")
        return f'{head} {mark[CONSTRAIN]} "json" {mark[MESSAGE]} {arguments(function)} {mark[CALL]}'


def harmony_of(tokenizer: Tokenizer) -> Harmony | None:
    """Return the format if the model writes in channels: its template does, and its vocabulary has the marks; else
    None."""
    if CHANNEL not in tokenizer.template_text or MESSAGE not in tokenizer.template_text:
        return None
    found = {mark: tokenizer.id_of(mark) for mark in _MARKS}
    specials = {mark: token for mark, token in found.items() if token is not None}
    tells_thoughts = tokenizer.chat_settings.reasoning_format != "none"
    return Harmony(specials, tells_thoughts) if len(specials) == len(_MARKS) else None
