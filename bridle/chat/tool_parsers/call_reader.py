"""Reads calls in growing text, in any format that a `CallFormat` describes.

Text outside of calls is content. Text from the markup that begins calls is held until it is certainly a call or
content. Spaces and line breaks around markup may differ from the template. If the format has no such markup, the output
is either calls from its first character on, or content.
"""

from __future__ import annotations

from bridle.chat.stream_deltas import ANY_CALL, CallRules, Content, StreamDelta, held_back
from bridle.chat.tool_parsers.call_format import CallFormat, PythonArguments, markup
from bridle.chat.tool_parsers.call_header import BARE_NAME, NotACall, Undecided
from bridle.chat.tool_parsers.held_call import HeldCall

#: The length of the parts in which long text is read, because each attempt to read a call takes all pushed text.
_CHUNK = 1024
#: A special token that some models write before bare calls. Outputs contain its text only if special tokens are not
#: skipped.
PYTHON_TAG = "<|python_tag|>"


class CallFormatReader:
    """Reads the calls and the content of one output, piece by piece."""

    def __init__(self, form: CallFormat, rules: CallRules = ANY_CALL) -> None:
        self._form, self._rules = form, rules
        self._trigger = form.trigger
        self._opening = markup(form.opening)
        self._marks = _marks_between(form)
        self._between_marks = " \t\n,;" if form.is_bare else " \t\n,"
        self._held = form.opening if form.is_prompted else ""
        self._is_own = form.is_prompted  # the first opening is in the prompt, and never part of the content
        self._num_blank = 0  # leading characters of `_held` that are white space
        self._space = ""  # white space after a call
        self._skipped: list[str] = []  # markup that was skipped since the last call or content
        self._in_calls = form.is_bare
        self._is_text = False  # all further output is text
        self._num_calls = 0
        self._call: HeldCall | None = None

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        """Return the deltas that are certain after `text`. With `is_last`, no more text follows."""
        pieces: list[StreamDelta] = []
        for start in range(0, max(len(text), 1), _CHUNK):
            self._held += text[start : start + _CHUNK]
            while self._step(pieces, is_last and start + _CHUNK >= len(text)):
                pass
        return pieces

    def _step(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        """Parse more of the held text. Return whether parsing can continue."""
        if self._call is not None:
            return self._in_call(self._call, pieces, is_last)
        return self._between(pieces, is_last) if self._in_calls else self._outside(pieces, is_last)

    def _outside(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        before, found, after = self._held.partition(self._trigger) if not self._is_text else (self._held, "", "")
        keep = 0 if found or is_last or self._is_text else held_back(before, self._trigger)
        self._say(before[: len(before) - keep], pieces)
        self._held = found + after if found else before[len(before) - keep :]
        self._in_calls = bool(found)
        return bool(found)

    def _between(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        """Skip markup and white space before or after a call. Return whether parsing can continue."""
        blank, self._num_blank = self._num_blank, 0
        rest = self._held[blank:].lstrip(self._between_marks)
        begin = len(self._held) - len(rest)
        if self._form.content_open and rest.startswith(self._form.content_open):
            self._held, self._in_calls, self._is_own = rest.removeprefix(self._form.content_open), False, False
            return bool(self._held)
        if self._form.content_open and self._form.content_open.startswith(rest) and not is_last:
            return False
        if self._opens(rest):
            self._call = HeldCall(self._form, self._rules, self._num_calls)
            self._skipped.append(self._held[:begin])
            self._call.text, self._held = rest, ""
            return True
        for mark in self._marks:
            if rest.startswith(mark):
                self._skipped.append(self._held[: begin + len(mark)])
                self._held = self._held[begin + len(mark) :]
                return True
        if not is_last and not rest:
            self._num_blank = begin
            return False
        if any(mark.startswith(rest) for mark in (*self._marks, self._opening)):
            if not is_last:
                return False
            if self._num_calls:  # the output was cut off within markup after a call
                self._held = ""
                return False
        return self._leave(rest, pieces, is_last)

    def _leave(self, rest: str, pieces: list[StreamDelta], is_last: bool) -> bool:
        """Handle text that is not a call: skipped markup before the first call is content, markup after calls is
        dropped."""
        self._in_calls = False
        self._is_text = self._form.is_bare
        if self._num_calls:
            self._space = ""
        else:
            self._say("".join(self._skipped), pieces)
        self._skipped = []
        if is_last and not rest and (self._num_calls or not self._held):
            self._held = ""
            return False
        held, self._held = self._held, ""
        # The held text begins like skipped markup but does not continue it, so its first character is content.
        self._say(held[:1], pieces)
        self._held = held[1:]
        return bool(self._held)

    def _opens(self, rest: str) -> bool:
        if self._opening:
            return rest.startswith(self._opening)
        if self._form.name_key is not None:
            return rest.startswith("{")
        return bool(BARE_NAME.match(rest)) and (any(map(str.strip, self._skipped)) or self._num_calls > 0)

    def _in_call(self, call: HeldCall, pieces: list[StreamDelta], is_last: bool) -> bool:
        text, self._held = self._held, ""
        try:
            rest = call.push(text, pieces, is_last)
        except Undecided:
            return False
        except NotACall:
            self._call, self._in_calls, self._is_text = None, False, self._form.is_bare
            told, self._held = call.given_up()
            self._say("".join(self._skipped) + told.removeprefix(self._trigger if self._is_own else ""), pieces)
            self._skipped, self._is_own = [], False
            return bool(self._held)
        self._call, self._held, self._skipped, self._is_own = None, rest, [], False
        self._num_calls, self._space = self._num_calls + 1, ""
        return True

    def _say(self, text: str, pieces: list[StreamDelta]) -> None:
        """Add content. White space after a call is held until the next text, because it may separate calls."""
        text, self._space = self._space + text, ""
        if self._num_calls and not text.strip():
            self._space = text
        elif text:
            pieces.append(Content(text))


def _marks_between(form: CallFormat) -> tuple[str, ...]:
    """Return markup that may appear between calls, longest first."""
    found = {markup(form.section_open), form.section_close.strip(), markup(form.separator)}
    found |= {form.section_close.strip().lstrip("]").strip(), form.end_mark}
    if form.section_open.rstrip().endswith("[") or isinstance(form.arguments, PythonArguments):
        found |= {"]", "["}
    if form.is_bare:
        found |= {PYTHON_TAG}
    return tuple(sorted(found - {"", markup(form.opening)}, key=len, reverse=True))
