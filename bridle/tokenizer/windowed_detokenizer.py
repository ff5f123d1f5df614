"""The text of a growing output, for vocabularies whose decoder depends on neighbouring tokens (WordPiece, and rare
ones).

Each new token is decoded together with the few tokens before it, and the text of those tokens alone is removed. That is
correct for every decoder that looks no further than the window.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

_WINDOW = 6  # tokens of context
_MAX_WAITING = 4  # tokens that may wait for the rest of a character
_UNFINISHED = "\ufffd"


class WindowText:
    """Implements `bridle.engine.interfaces.TextState` with `decode`, which converts visible tokens to text."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], skipped: AbstractSet[int]) -> None:
        self._decode = decode
        self._prompt = prompt
        self._skipped = skipped
        self._tokens: list[int] = []
        self._lengths = array("i")  # characters that became certain with each token
        self._waits = array("b")  # visible tokens whose text was not returned yet, after each token

    @property
    def is_waiting(self) -> bool:
        """Return whether the last token ends inside of a character."""
        return bool(self._waits) and self._waits[-1] > 0

    def push(self, token: int) -> str:
        """Append a token. Return the characters that became certain."""
        self._tokens.append(token)
        waiting = self._waits[-1] if self._waits else 0
        text = ""
        if token not in self._skipped:
            waiting += 1
            text = self._text_of_last(waiting)
            if text.endswith(_UNFINISHED) and waiting < _MAX_WAITING:
                text = ""
            else:
                waiting = 0
        self._lengths.append(len(text))
        self._waits.append(waiting)
        return text

    def rewind(self, num_tokens: int) -> int:
        """Roll back the last tokens, which may include tokens of the prompt. Return how many of the returned characters
        disappear."""
        kept = len(self._tokens) - num_tokens
        size = max(kept, 0)
        gone = sum(self._lengths[size:])
        del self._tokens[size:], self._lengths[size:], self._waits[size:]
        if kept < 0:
            self._prompt = self._prompt[: max(len(self._prompt) + kept, 0)]
        return gone

    def flush(self) -> str:
        """End the text. Return the remaining text."""
        waiting = self._waits[-1] if self._waits else 0
        if not waiting:
            return ""
        self._waits[-1] = 0
        return self._text_of_last(waiting)

    def copy(self) -> WindowText:
        """Return an independent copy."""
        twin = WindowText(self._decode, self._prompt, self._skipped)
        twin._tokens = self._tokens.copy()
        twin._lengths, twin._waits = self._lengths[:], self._waits[:]
        return twin

    def _text_of_last(self, num_tokens: int) -> str:
        """Return the text that the last `num_tokens` visible tokens add to the text before them."""
        visible: list[int] = []
        for token in self._backwards():
            if len(visible) == num_tokens + _WINDOW:
                break
            visible.append(token)
        visible.reverse()
        before = self._decode(visible[:-num_tokens])
        return self._decode(visible)[len(before) :]

    def _backwards(self) -> Iterator[int]:
        for part in (self._tokens, self._prompt):
            for token in reversed(part):
                if token not in self._skipped:
                    yield token
