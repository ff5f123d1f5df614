"""A tokenizer for tests: a list of pieces, one per token id.

A piece is text, or bytes for a token that holds only part of a character: such bytes become text with the
token that completes them, as with byte-level vocabularies. Knows nothing of special tokens: all pieces count.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class PieceDecoder:
    """A `TextDecoder` over `pieces`; `alphabet(n)` makes one with `n` letters."""

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        self.pieces = tuple(piece.encode() if isinstance(piece, str) else piece for piece in pieces)

    @classmethod
    def alphabet(cls, vocab_size: int) -> PieceDecoder:
        """Token 0 is `a`, token 1 is `b`, and so on through the code points."""
        return cls([chr(ord("a") + token) for token in range(vocab_size)])

    def open(self, prompt: Sequence[int], skip_special_tokens: bool) -> PieceState:
        """State for output that follows `prompt`; both arguments make no difference here."""
        return PieceState(self.pieces)

    def token_text(self, token: int) -> str:
        """The piece by itself."""
        return self.decode([token])

    def tokens_of(self, text: str) -> list[int]:
        """The longest pieces that spell the text, one after the other; bytes that no piece has are left out."""
        data, tokens = text.encode(), []
        while data:
            fits = [token for token, piece in enumerate(self.pieces) if piece and data.startswith(piece)]
            token = max(fits, key=lambda each: len(self.pieces[each]), default=None)
            if token is not None:
                tokens.append(token)
            data = data[1 if token is None else len(self.pieces[token]) :]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of complete output: unfinished characters are U+FFFD."""
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")


class PieceState:
    """The text of one growing output: tokens, and how many characters were certain after each."""

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        self._pieces = pieces
        self._tokens: list[int] = []
        self._certain = [0]  # characters after each token, from none on

    @property
    def is_waiting(self) -> bool:
        """Return whether the last token ends inside of a character."""
        return len(self._text(final=True)) > self._certain[-1]

    def push(self, token: int) -> str:
        """Append a token; gives the characters that became certain."""
        self._tokens.append(token)
        text = self._text(final=False)
        self._certain.append(len(text))
        return text[self._certain[-2] :]

    def rewind(self, num_tokens: int) -> int:
        """Take tokens back; gives the number of characters that disappear."""
        before = self._certain[-1]
        del self._tokens[len(self._tokens) - num_tokens :]
        del self._certain[len(self._tokens) + 1 :]
        return before - self._certain[-1]

    def flush(self) -> str:
        """Return the rest: an unfinished character becomes U+FFFD."""
        return self._text(final=True)[self._certain[-1] :]

    def copy(self) -> PieceState:
        """An independent copy."""
        twin = PieceState(self._pieces)
        twin._tokens, twin._certain = list(self._tokens), list(self._certain)
        return twin

    def _text(self, final: bool) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(b"".join(self._pieces[token] for token in self._tokens), final)
