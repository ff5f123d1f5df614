"""Reads calls out of growing text, in any format that is described by a `CallFormat`.

Text outside of calls is content. From the markup that begins calls on, text is held until it is clear what it is: a
call, or content after all. Spaces and line breaks around markup may differ from what the template writes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from bridle.chat.stream_deltas import (
    ANY_CALL,
    CallArguments,
    CallRules,
    Content,
    StreamDelta,
    ToolCallStart,
    held_back,
    new_call_id,
)
from bridle.chat.tool_parsers.argument_values import QuotedReader, read_keywords
from bridle.chat.tool_parsers.call_format import (
    CallFormat,
    JsonArguments,
    PythonArguments,
    QuotedArguments,
    TaggedArguments,
    markup,
)
from bridle.chat.tool_parsers.call_header import BARE_NAME, NotACall, Undecided, end_pattern, read_header
from bridle.chat.tool_parsers.json_call import JsonCallReader
from bridle.chat.tool_parsers.tagged_arguments import read_tagged

#: Characters that are parsed to find the end of one call. Behind an end that was tried, text is parsed again.
_MAX_PARSED = 2 << 20


class CallFormatReader:
    """Reads an output piece by piece."""

    def __init__(self, form: CallFormat, rules: CallRules = ANY_CALL) -> None:
        self._form, self._rules = form, rules
        self._trigger = form.trigger
        self._marks = _marks_between(form)
        self._held = ""
        self._space = ""  # after a call
        self._skipped = ""  # markup that was passed since the last call or content
        self._in_calls = False
        self._num_calls = 0
        self._call: _HeldCall | None = None

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        """What became certain with `text`; with `is_last` nothing follows."""
        self._held += text
        pieces: list[StreamDelta] = []
        while self._step(pieces, is_last):
            pass
        return pieces

    def _step(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        """Go on; whether that may lead to more."""
        if self._call is not None:
            return self._in_call(self._call, pieces, is_last)
        return self._between(pieces, is_last) if self._in_calls else self._outside(pieces, is_last)

    def _outside(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        before, found, after = self._held.partition(self._trigger)
        keep = 0 if found or is_last else held_back(before, self._trigger)
        self._say(before[: len(before) - keep], pieces)
        self._held = found + after if found else before[len(before) - keep :]
        self._in_calls = bool(found)
        return bool(found)

    def _between(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        """In front of a call, or behind one: pass markup and white space."""
        rest = self._held.lstrip(" \t\n,")
        if self._form.name_key is not None and not any(map(rest.startswith, self._marks)):
            rest = rest.lstrip(" \t\n,[")
        if self._opens(rest):
            self._call = _HeldCall(self._form, self._rules, self._num_calls)
            self._skipped += self._held[: len(self._held) - len(rest)]
            self._call.text, self._held = rest, ""
            return True
        for mark in self._marks:
            if rest.startswith(mark):
                end = len(self._held) - len(rest) + len(mark)
                self._skipped, self._held = self._skipped + self._held[:end], self._held[end:]
                return True
        if not is_last and (not rest or any(mark.startswith(rest) for mark in self._all_marks)):
            return False
        self._in_calls = False
        if self._num_calls:
            self._space, self._skipped = "", ""  # the markup behind calls is no content
        else:
            self._say(self._skipped, pieces)
            self._skipped = ""
        if is_last and not rest:
            return False
        held, self._held = self._held, ""
        # What could not go on begins like markup that was passed over already: the first character is content.
        self._say(held[:1], pieces)
        self._held = held[1:]
        return bool(self._held)

    @property
    def _all_marks(self) -> tuple[str, ...]:
        return (*self._marks, markup(self._form.opening))

    def _opens(self, rest: str) -> bool:
        mark = markup(self._form.opening)
        if mark:
            return rest.startswith(mark)
        if self._form.name_key is not None:
            return rest.startswith("{")
        return bool(BARE_NAME.match(rest)) and (bool(self._skipped) or self._num_calls > 0)

    def _in_call(self, call: _HeldCall, pieces: list[StreamDelta], is_last: bool) -> bool:
        text, self._held = self._held, ""
        try:
            rest = call.push(text, pieces, is_last)
        except Undecided:
            return False
        except NotACall:
            self._call, self._in_calls = None, False
            self._say(self._skipped + call.text, pieces)
            self._skipped = ""
            return False
        self._call, self._held, self._skipped = None, rest, ""
        self._num_calls, self._space = self._num_calls + 1, ""
        return True

    def _say(self, text: str, pieces: list[StreamDelta]) -> None:
        """Content. White space behind a call waits for what follows: it may separate calls."""
        text, self._space = self._space + text, ""
        if self._num_calls and not text.strip():
            self._space = text
        elif text:
            pieces.append(Content(text))


def _marks_between(form: CallFormat) -> tuple[str, ...]:
    """Markup that may stand between calls, the longest first."""
    opening = markup(form.opening)
    found = {markup(form.section_open), form.section_close.strip(), markup(form.separator)}
    found |= {form.section_close.strip().lstrip("]").strip(), _end_markup(form.closing)}
    if form.name_key is not None or isinstance(form.arguments, PythonArguments):
        found |= {"]", "["}
    return tuple(sorted(found - {"", opening}, key=len, reverse=True))


def _end_markup(closing: str) -> str:
    """The part of a call's end that is no JSON."""
    return closing.strip().lstrip("}").strip()


class _HeldCall:
    """One call, read from its markup on. `text` is all of it, as long as it may turn out to be content."""

    def __init__(self, form: CallFormat, rules: CallRules, number: int) -> None:
        self._form, self._rules, self._number = form, rules, number
        self.text = ""
        self._json: JsonCallReader | None = None
        self._name: str | None = None
        self._body = 0  # where the arguments begin
        self._looked = 0  # up to where an end was looked for
        self._num_parsed = 0  # characters

    def push(self, text: str, pieces: list[StreamDelta], is_last: bool) -> str:
        """Read on; the text behind the call once it is over. Raises `Undecided` or `NotACall`."""
        fresh = self.text + text if self._json is None else text
        self.text = fresh if self._json is None else self.text + text
        if self._json is None and self._name is None:
            self._begin(is_last)
            fresh = self.text[self._body :]
        if self._json is not None:
            return self._in_json(self._json, fresh, pieces, is_last)
        return self._in_body(pieces, is_last)

    def _begin(self, is_last: bool) -> None:
        if self._form.name_key is not None:
            mark = markup(self._form.opening)
            found = re.compile(r"\s*").match(self.text, len(mark))
            assert found is not None
            self._body = found.end()
            self._json = JsonCallReader(self._number, self._rules, keys=_keys_of(self._form))
            return
        name, self._body = read_header(self._form, self.text, is_last)
        if not self._rules.allow(name):
            raise NotACall
        self._name = name
        if isinstance(self._form.arguments, JsonArguments):
            self._json = JsonCallReader(self._number, self._rules, name)

    def _in_json(self, call: JsonCallReader, text: str, pieces: list[StreamDelta], is_last: bool) -> str:
        pieces += call.push(text, is_last)
        if not call.is_over:
            raise Undecided
        if call.is_bad:
            raise NotACall
        return call.rest

    def _in_body(self, pieces: list[StreamDelta], is_last: bool) -> str:
        assert self._name is not None
        end = end_pattern(self._form)
        for found in end.finditer(self.text, max(self._looked, self._body)):
            self._looked = found.end()
            self._num_parsed += found.start() - self._body
            try:
                arguments = self._arguments(self.text[self._body : found.start()])
                value = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            except ValueError:
                if self._num_parsed >= _MAX_PARSED:
                    raise NotACall from None
                continue
            self._tell(value, pieces)
            return self.text[found.end() :]
        if is_last:
            raise NotACall
        self._looked = max(self._looked, self._body, len(self.text) - len(self._form.closing) - 8)
        raise Undecided

    def _arguments(self, text: str) -> dict[str, Any]:
        schema = self._rules.schemas.get(self._name or "")
        match self._form.arguments:
            case TaggedArguments() as tagged:
                return read_tagged(tagged, text, schema)
            case PythonArguments():
                return read_keywords(text)
            case QuotedArguments(quote=quote):
                return QuotedReader(text, quote).fields()
        raise NotACall

    def _tell(self, value: str, pieces: list[StreamDelta]) -> None:
        assert self._name is not None
        pieces.append(ToolCallStart(self._number, self._name, new_call_id()))
        pieces.append(CallArguments(self._number, value))


def _keys_of(form: CallFormat) -> tuple[str, str] | None:
    return (form.name_key, form.arguments_key) if form.name_key else None
