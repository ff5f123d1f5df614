"""The bytes of a vocabulary's ordinary tokens, sorted, so that tokens with the same prefix are adjacent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator


class TokenPrefixes:
    """Finds tokens by a prefix. `pairs` are tokens with their bytes; tokens without bytes are left out."""

    def __init__(self, pairs: Iterable[tuple[int, bytes]]) -> None:
        found = sorted((data, token) for token, data in pairs if data)
        self._data, self._tokens = [data for data, _ in found], [token for _, token in found]
        self.bytes_of = dict(zip(self._tokens, self._data, strict=True))

    def beginning_with(self, text: bytes) -> Iterator[int]:
        """Yield the tokens whose bytes begin with `text`."""
        at = bisect_left(self._data, text)
        while at < len(self._data) and self._data[at].startswith(text):
            yield self._tokens[at]
            at += 1

    def goes_on(self, text: bytes) -> bool:
        """Return whether a longer token begins with `text`."""
        return any(self.bytes_of[token] != text for token in self.beginning_with(text))

    def parts_of(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Yield the tokens that are a proper prefix of `text`, with their numbers of bytes."""
        for size in range(1, len(text)):
            at = bisect_left(self._data, text[:size])
            while at < len(self._data) and self._data[at] == text[:size]:
                yield self._tokens[at], size
                at += 1

    def agreeing_with(self, text: bytes) -> Iterator[int]:
        """Yield the tokens that begin with `text`, or are a prefix of it."""
        yield from (token for token, _ in self.parts_of(text))
        yield from self.beginning_with(text)
