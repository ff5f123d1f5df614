"""A tokenizer for tests: a list of pieces, one for each token id.

A piece is text, or bytes for a token that has only part of a character. The bytes of part of a character become text
together with the token that completes the character, as in byte-level vocabularies. The tokenizer has no special
tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class PieceDecoder:
    """A `TextDecoder` over `pieces`; `alphabet(n)` makes a decoder with `n` letters."""

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        self.pieces = tuple(piece.encode() if isinstance(piece, str) else piece for piece in pieces)

    @classmethod
    def alphabet(cls, vocab_size: int) -> PieceDecoder:
        """Return a decoder in which token 0 is `a`, token 1 is `b`, and so on through the code points."""
        return cls([chr(ord("a") + token) for token in range(vocab_size)])

    def open(self, prompt: Sequence[int], skip_special_tokens: bool) -> PieceState:
        """Return the decoding state of an output that follows `prompt`. Neither argument of `open` has an effect on the
        state."""
        return PieceState(self.pieces)

    def token_text(self, token: int) -> str:
        """Return the text of one piece."""
        return self.decode([token])

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of the longest pieces that spell the text, one after the other. Bytes for which there is no
        piece are left out."""
        data, tokens = text.encode(), []
        while data:
            fits = [token for token, piece in enumerate(self.pieces) if piece and data.startswith(piece)]
            token = max(fits, key=lambda each: len(self.pieces[each]), default=None)
            if token is not None:
                tokens.append(token)
            data = data[1 if token is None else len(self.pieces[token]) :]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a complete output, with U+FFFD for unfinished characters."""
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")


class PieceState:
    """The text of one growing output: its tokens, and the number of complete characters after each token."""

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        self._pieces = pieces
        self._tokens: list[int] = []
        self._certain = [0]  # number of certain characters after each token; 0 before the first

    @property
    def is_waiting(self) -> bool:
        """Return whether the last token ends inside of a character."""
        return len(self._text(final=True)) > self._certain[-1]

    def push(self, token: int) -> str:
        """Append a token. Returns the characters that are now complete."""
        self._tokens.append(token)
        text = self._text(final=False)
        self._certain.append(len(text))
        return text[self._certain[-2] :]

    def rewind(self, num_tokens: int) -> int:
        """Roll back tokens. Returns the number of characters that are removed."""
        before = self._certain[-1]
        del self._tokens[len(self._tokens) - num_tokens :]
        del self._certain[len(self._tokens) + 1 :]
        return before - self._certain[-1]

    def flush(self) -> str:
        """Return the remaining characters; an unfinished character becomes U+FFFD."""
        return self._text(final=True)[self._certain[-1] :]

    def copy(self) -> PieceState:
        """Return an independent copy."""
        twin = PieceState(self._pieces)
        twin._tokens, twin._certain = list(self._tokens), list(self._certain)
        return twin

    def _text(self, final: bool) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(b"".join(self._pieces[token] for token in self._tokens), final)
