"""When an output is complete: the standard criteria, as instances of the `StoppingCriteria` protocol.

A criterion sees the tokens after each one that a sequence gains. It returns None to go on, the token or a short
text that explains the stop, or `FinishReason.LENGTH` when a limit was reached. Stop strings need text and are found
by `OutputText`. Criteria of a user's own are called after these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bridle.outputs import FinishReason


class StopOnTokens:
    """Stop when the last token is one of `ids`."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = frozenset(ids)

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> int | None:
        return tokens[-1] if tokens[-1] in self.ids else None


class MaxLength:
    """Stop when there are `max_len` tokens, prompt included."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> str | None:
        return FinishReason.LENGTH if len(tokens) >= self.max_len else None


class MaxNewTokens:
    """Stop after `limit` generated tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> str | None:
        return FinishReason.LENGTH if len(tokens) - num_prompt >= self.limit else None


class StopOnRepetition:
    """Stop when the last `num_tokens` tokens were generated `times` times in a row."""

    def __init__(self, num_tokens: int, times: int) -> None:
        self.num_tokens = num_tokens
        self.times = times

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> str | None:
        size = self.num_tokens
        if len(tokens) - num_prompt < size * self.times:
            return None
        last = list(tokens[-size:])
        for k in range(2, self.times + 1):
            if list(tokens[-k * size : -(k - 1) * size]) != last:
                return None
        return "repetition"
