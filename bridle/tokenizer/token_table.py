"""The text of each token of a vocabulary, if the text does not depend on the token's neighbours.

Byte-level BPE and SentencePiece with byte fallback have such a table: the text of a token list is the UTF-8 decoding of
its tokens' joined bytes. Only the beginning of a text may differ, because some decoders drop a space there. Decoders
that depend on neighbouring tokens (WordPiece, and rare ones) have no table; see `windowed_detokenizer`.

Bytes that are not UTF-8 become U+FFFD one by one, as everywhere in Python and Rust. Only the byte fallback of the
`tokenizers` library differs: if one byte token is invalid, it replaces the whole run of byte tokens, including valid
characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

Spec = dict[str, Any]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable:
    """The text or bytes of every token id. `pieces[i]` is the vocabulary's name of token i, None if there is no such
    token. `texts` and `raw` may come from an earlier table of the same pieces."""

    def __init__(
        self,
        pieces: Sequence[str | None],
        spelling: Spelling,
        texts: list[str | None] | None = None,
        raw: dict[int, bytes] | None = None,
    ) -> None:
        self._pieces = pieces
        self._spelling = spelling
        self.decoder = spelling.spec
        self.drops_in_first = spelling.drops_in_first
        #: The special treatment of a text's beginning: the number of spaces that may be dropped, or 1 if the first
        #: token loses all of its leading spaces.
        self.initial_lead = 1 if spelling.drops_in_first else spelling.strip
        #: Text of each token that consists of complete characters; None for the other tokens, which are in `raw`.
        self.texts: list[str | None] = texts or [""] * len(pieces)
        #: Bytes of the tokens that contain parts of characters.
        self.raw: dict[int, bytes] = raw or {}
        for token, piece in enumerate(pieces if texts is None else ()):
            if piece is not None:
                self._enter(token, spelling.spell(piece))

    def _enter(self, token: int, data: bytes) -> None:
        try:
            self.texts[token] = data.decode("utf-8")
        except UnicodeDecodeError:
            self.texts[token] = None
            self.raw[token] = data

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of the token inside a text; empty if there is no such token."""
        if not 0 <= token < len(self.texts):
            return b""
        text = self.texts[token]
        return self.raw[token] if text is None else text.encode("utf-8")

    def all_bytes(self) -> list[bytes]:
        """Return the bytes of each token."""
        found = [b"" if text is None else text.encode("utf-8") for text in self.texts]
        for token, data in self.raw.items():
            found[token] = data
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens` as a whole text, with the special treatment of its beginning."""
        lead, parts = self.initial_lead, []
        for token in tokens:
            if self._spelling.drops_in_first and lead:
                parts.append(self.first_bytes(token))
                lead = 0
            else:
                parts.append(self.bytes_of(token))
        text = b"".join(parts).decode("utf-8", "replace")
        return self.strip(text, lead)[0] if lead else text

    # -- the beginning of a text -----------------------------------------------------------------------------

    def first_bytes(self, token: int) -> bytes:
        """Return the bytes of the token at the beginning of a text."""
        piece = self._pieces[token] if 0 <= token < len(self._pieces) else None
        return b"" if piece is None else self._spelling.spell(piece, is_first=True)

    def strip(self, text: str, lead: int) -> tuple[str, int]:
        """Remove at most `lead` leading spaces. Return the text, and how many spaces may be removed from the next
        text."""
        count = 0
        while count < min(lead, len(text)) and text[count] == self._spelling.strip_char:
            count += 1
        rest = text[count:]
        return rest, 0 if rest else lead - count


class Spelling:
    """A decoder of the `tokenizers` library, as a rule that converts a token's name to its bytes.

    Raises `ValueError` for a decoder that depends on neighbouring tokens.
    """

    def __init__(self, spec: Spec | None) -> None:
        self.spec = spec
        self.strip = 0
        self.strip_char = " "
        self.drops_in_first = False
        self._replacements: list[tuple[str, str]] = []
        self._metaspace: str | None = None
        self._byte_fallback = False
        self._byte_level = False
        self._fused = False
        for stage in _flat(spec):
            read = getattr(self, f"_read_{str(stage.get('type')).lower()}", None)
            if read is None:
                raise ValueError(f"decoder {stage.get('type')!r} depends on neighbouring tokens")
            read(stage)
        if self.drops_in_first and self.strip:
            raise ValueError("the decoder has two rules for the beginning of a text")

    def spell(self, piece: str, is_first: bool = False) -> bytes:
        """Return the bytes of a token by its name in the vocabulary. `is_first`: the token begins a text."""
        if self._byte_level:
            try:
                return piece.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:  # a character that represents no byte
                return piece.encode("utf-8")
        if self._byte_fallback and piece[:1] == "<" and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        if self._metaspace is not None:
            piece = piece.replace(self._metaspace, "" if is_first and self.drops_in_first else " ")
        return piece.encode("utf-8", "surrogatepass")

    def _read_bytelevel(self, stage: Spec) -> None:
        if self._replacements or self._byte_fallback or self._fused or self._metaspace is not None:
            raise ValueError("the decoder has ByteLevel after another stage")
        self._byte_level = True

    def _read_bytefallback(self, stage: Spec) -> None:
        self._byte_fallback = True

    def _read_fuse(self, stage: Spec) -> None:
        self._fused = True

    def _read_replace(self, stage: Spec) -> None:
        old = stage.get("pattern", {}).get("String")
        if not old or self._byte_level or (self._fused and len(old) > 1):
            raise ValueError("the decoder has a replacement that may span tokens")
        self._replacements.append((old, stage.get("content", "")))

    def _read_strip(self, stage: Spec) -> None:
        if stage.get("stop", 0) or not self._fused or self.strip:
            raise ValueError("the decoder has a Strip that is not only at the beginning")
        self.strip, self.strip_char = int(stage.get("start", 0)), str(stage.get("content", " "))

    def _read_metaspace(self, stage: Spec) -> None:
        if self._fused:
            raise ValueError("the decoder has Metaspace after Fuse")
        self._metaspace = str(stage.get("replacement", "\u2581"))
        self.drops_in_first = stage.get("prepend_scheme", "always") != "never"


def _flat(spec: Spec | None) -> Iterable[Spec]:
    if spec is None:
        raise ValueError("the tokenizer has no decoder, so tokens are joined with spaces")
    if spec.get("type") != "Sequence":
        return [spec]
    return [stage for inner in spec.get("decoders", []) for stage in _flat(inner)]


def _byte_alphabet() -> dict[int, int]:
    """Return a table for `str.translate` from the characters of byte-level vocabularies to bytes. Printable characters
    represent themselves; the other bytes are represented by the characters from U+0100 on, in order. A character that
    is represented by another character is mapped to a character that is not a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(moved, _NO_BYTE) | {0x100 + i: byte for i, byte in enumerate(moved)}


_NO_BYTE = 0xFFFF
_BYTES = _byte_alphabet()
