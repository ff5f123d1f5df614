"""Reads one call in growing text, in any format: its header, and its arguments up to their end."""

from __future__ import annotations

import json
import re
from typing import Any

from bridle.chat.stream_deltas import CallArguments, CallRules, StreamDelta, ToolCallStart, new_call_id
from bridle.chat.tool_parsers import call_format as cf
from bridle.chat.tool_parsers.argument_values import QuotedReader, property_schema, read_keywords, typed
from bridle.chat.tool_parsers.call_header import NotACall, Undecided, end_pattern, read_header
from bridle.chat.tool_parsers.json_call import USUAL_KEYS, JsonCallReader
from bridle.chat.tool_parsers.tagged_arguments import read_tagged

#: The maximum number of characters that are parsed to find the end of one call. After each failed attempt, the text is
#: parsed again.
_MAX_PARSED = 2 << 20
_SPACE = re.compile(r"\s*")


class HeldCall:
    """One call, from its markup on. `text` is the whole text of the call, which may still turn out to be content."""

    def __init__(self, form: cf.CallFormat, rules: CallRules, number: int) -> None:
        self._form, self._rules, self._number = form, rules, number
        self.text = ""
        self._json: JsonCallReader | None = None
        self._name: str | None = None
        self._body = 0  # position where the arguments begin
        self._looked = 0  # position up to which an end was searched
        self._num_parsed = 0  # number of parsed characters
        self._has_end = False

    def push(self, text: str, pieces: list[StreamDelta], is_last: bool) -> str:
        """Continue reading. Return the text after the call once the call has ended. Raises `Undecided` or
        `NotACall`."""
        fresh = self.text + text if self._json is None else text
        if self._json is None:
            self.text = fresh
        if self._json is None and self._name is None:
            self._begin(is_last)
            fresh = self.text[self._body :]
        if self._json is not None:
            return self._in_json(self._json, fresh, pieces, is_last)
        return self._in_body(pieces, is_last)

    def given_up(self) -> tuple[str, str]:
        """Return the two parts of a text that is not a call: the part that is certainly content, and the part that must
        be read again."""
        if self._json is not None:
            return self.text[: self._body] + self._json.text, self._json.rest
        if self._name is not None:
            return self.text, ""
        known = max(len(cf.markup(self._form.opening)), 1)
        return self.text[:known], self.text[known:]

    def _begin(self, is_last: bool) -> None:
        end = "" if self._form.is_bare or not self._rules.tells_cut else self._form.end_mark or self._form.trigger
        if self._form.name_key is not None:
            found = _SPACE.match(self.text, len(cf.markup(self._form.opening)))
            assert found is not None
            self._body = found.end()
            self._json = JsonCallReader(self._number, self._rules, keys=_keys_of(self._form), end=end)
            return
        name, self._body = read_header(self._form, self.text, is_last)
        if not self._rules.allow(name):
            raise NotACall
        self._name = name
        if isinstance(self._form.arguments, cf.JsonArguments):
            self._json = JsonCallReader(self._number, self._rules, name, end=end)

    def _in_json(self, call: JsonCallReader, text: str, pieces: list[StreamDelta], is_last: bool) -> str:
        pieces += call.push(text, is_last)
        if not call.is_over:
            raise Undecided
        if call.is_bad:
            raise NotACall
        return call.rest

    def _in_body(self, pieces: list[StreamDelta], is_last: bool) -> str:
        end = end_pattern(self._form)
        for found in end.finditer(self.text, max(self._looked, self._body)):
            self._looked, self._has_end = found.end(), True
            self._num_parsed += found.start() - self._body
            try:
                value = json.dumps(self._arguments(found.start()), ensure_ascii=False, allow_nan=False)
            except ValueError:
                if self._num_parsed >= _MAX_PARSED:
                    raise NotACall from None
                continue
            self._tell(value, pieces)
            return self.text[found.end() :]
        if is_last and (self._has_end or self._form.is_bare or not self._rules.tells_cut):
            raise NotACall
        if is_last:  # the call was cut off: report its complete part
            self._tell(json.dumps(self._arguments(len(self.text), is_cut=True), ensure_ascii=False)[:-1], pieces)
            return ""
        self._looked = max(self._looked, self._body, self._begun_end())
        raise Undecided

    def _begun_end(self) -> int:
        """Return the position where an incomplete end of the call may begin."""
        words = self._form.closing.split() or [""]
        last = self.text.rfind(words[0], self._looked)
        if last >= 0 and "".join(words).startswith("".join(self.text[last:].split())):
            return last
        return len(self.text) - len(words[0]) + 1

    def _arguments(self, end: int, is_cut: bool = False) -> dict[str, Any]:
        """Return the arguments up to a position in the text. Incomplete arguments are read only if they are tagged."""
        text, schema = self.text[self._body : end].rstrip(), self._rules.schemas.get(self._name or "")
        match self._form.arguments:
            case cf.TaggedArguments() as tagged:
                return read_tagged(tagged, text, schema, is_cut)
            case _ if is_cut:
                return {}
            case cf.PythonArguments():
                return read_keywords(text, schema)
            case cf.QuotedArguments(quote=quote):
                found = QuotedReader(text, quote).fields()
                return {key: typed(value, property_schema(schema, key)) for key, value in found.items()}
        raise NotACall

    def _tell(self, value: str, pieces: list[StreamDelta]) -> None:
        assert self._name is not None
        pieces.append(ToolCallStart(self._number, self._name, new_call_id()))
        pieces.append(CallArguments(self._number, value))


def _keys_of(form: cf.CallFormat) -> tuple[str, str] | None:
    if form.name_key == USUAL_KEYS[0] and form.arguments_key in (USUAL_KEYS[1], "parameters"):
        return USUAL_KEYS
    return (form.name_key, form.arguments_key) if form.name_key else None
