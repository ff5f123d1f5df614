"""Encodes stream events that differ only in their text. The rest of the event is encoded only once."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from bridle.outputs import TokenEvent

_encode = msgspec.json.Encoder().encode
#: A random text that no output contains.
_MARK = f"bridle-{secrets.token_hex(16)}"


def text_of(tokens: list[TokenEvent]) -> str:
    """Return the joined text of token events."""
    return tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])


class TextTemplate:
    """Encodes token events as one stream event with their text. `make` encodes an event with a given text, which must
    occur once in the event. `note` is called with each text.

        template = TextTemplate(lambda text: sse_event({"delta": text}))
        template([TokenEvent("1", 0, text="Hi")])  # b'data: {"delta":"Hi"}' and an empty line
    """

    def __init__(self, make: Callable[[str], bytes], note: Callable[[str], None] | None = None) -> None:
        self._before, self._after = make(_MARK).split(_encode(_MARK))
        self._note = note

    def __call__(self, tokens: list[TokenEvent]) -> bytes:
        """Return the encoded event; empty if the tokens have no text."""
        text = text_of(tokens)
        if not text:
            return b""
        if self._note is not None:
            self._note(text)
        return self._before + _encode(text) + self._after
