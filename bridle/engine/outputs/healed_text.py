"""The visible text of an output with token healing: the output first repeats the removed end of its prompt (see
`sampling.token_healing`)."""

from __future__ import annotations

from bridle.engine.interfaces import TextState


class HealedText:
    """The text of an output without its first `num_chars` characters. Implements `TextState`."""

    def __init__(self, state: TextState, num_chars: int, num_known: int = 0) -> None:
        self._state = state
        self._num_chars = num_chars
        self._num_known = num_known  # characters so far, hidden ones included

    @property
    def is_waiting(self) -> bool:
        """Return whether the last token ends inside of a character."""
        return self._state.is_waiting

    def push(self, token: int) -> str:
        """Append a token. Returns the visible characters that are now complete."""
        return self._shown(self._state.push(token))

    def rewind(self, num_tokens: int) -> int:
        """Roll back the last `num_tokens` tokens. Returns the number of visible characters that are removed."""
        num_before = self._num_visible
        self._num_known -= self._state.rewind(num_tokens)
        return num_before - self._num_visible

    def flush(self) -> str:
        """End the text. Returns the visible characters that were not returned yet."""
        return self._shown(self._state.flush())

    def copy(self) -> HealedText:
        """Return an independent copy of this text."""
        return HealedText(self._state.copy(), self._num_chars, self._num_known)

    @property
    def _num_visible(self) -> int:
        return max(self._num_known - self._num_chars, 0)

    def _shown(self, text: str) -> str:
        num_before = self._num_visible
        self._num_known += len(text)
        return text[len(text) - (self._num_visible - num_before) :]
