"""A model's vocabulary in the form that llguidance needs: the bytes of every token, and canonical tokenization.

The vocabulary is built from token bytes, so it works with any tokenizer, and masks always agree with the text. Ids
beyond the tokenizer's vocabulary, which models add as padding, have no bytes and are never allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from bridle.errors import UnsupportedFeature
from bridle.structured_output.remembered import Remembered, State

if TYPE_CHECKING:
    from bridle.structured_output.canonical_pairs import CanonicalPairs
    from bridle.tokenizer import Tokenizer

#: Maximum number of forced texts whose tokens are remembered, and maximum bytes of each. Words of a grammar recur
#: often.
_MAX_SPELLED = 4_096
_MAX_SHORT = 64
#: Maximum number of remembered masks.
_MAX_MASKS = 256


class GrammarVocabulary:
    """`tokens[i]` are the bytes of token i, `eos` the tokens that end a text. `encode(text)` returns the canonical
    tokens of a text inside a document. `size` is the length of a mask in bits; `tokens` is padded to it."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos: Sequence[int],
        special: Iterable[int],
        encode: Callable[[str], Sequence[int]],
        size: int | None = None,
    ) -> None:
        self.size = len(tokens) if size is None else size
        self.eos = tuple(token for token in dict.fromkeys(eos) if token < self.size)
        # a model without an end token gets one beyond its vocabulary, which is never sampled
        self._own_end = not self.eos
        padding = [b""] * (self.size - len(tokens) + self._own_end)
        self.tokens = [*tokens[: self.size], *padding]
        ends = self.eos or (self.size,)
        self.special = frozenset(token for token in special if token < self.size).union(ends)
        self._encode = encode
        #: Masks by grammar and committed tokens, each up to 32 kB.
        self.masks = Remembered[State, bytes](_MAX_MASKS)
        self.backend = load_llguidance().LLTokenizer(
            load_llguidance().TokenizerWrapper(_Wrapper(self, ends[0])), eos_token=list(ends)
        )

    @property
    def mask_bytes(self) -> int:
        """Return the number of bytes of a mask, which is a row of 32-bit words."""
        return 4 * ((self.size + 31) // 32)

    @cached_property
    def end_row(self) -> bytes:
        """Return the mask that allows only the end tokens."""
        row = bytearray(self.mask_bytes)
        for token in self.eos:
            row[token >> 3] |= 1 << (token & 7)
        return bytes(row)

    def text_of(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of the tokens; special tokens have none."""
        return b"".join(self.tokens[token] for token in tokens if token not in self.special)

    def encode(self, data: bytes) -> list[int]:
        """Return the canonical tokens of a text that consists of whole characters. If the tokenizer would change the
        text, or its tokens do not spell the text, return the longest tokens that fit. The list ends before bytes that
        no token has."""
        try:
            tokens = list(self._encode(data.decode()))
        except ValueError:
            tokens = []
        if tokens and all(token < self.size for token in tokens) and self.text_of(tokens) == data:
            return tokens
        return self._longest(data)

    def written(self, text: str) -> list[int]:
        """Return the tokens that the tokenizer produces for a text, even if they do not spell it."""
        try:
            return list(self._encode(text))
        except ValueError:
            return []

    @cached_property
    def pairs(self) -> CanonicalPairs:
        """Return the object that knows which tokens the tokenizer may produce one after the other."""
        from bridle.structured_output.canonical_pairs import CanonicalPairs

        return CanonicalPairs(self)

    def token_of(self, data: bytes) -> int | None:
        """Return the token that spells exactly `data`, or None."""
        return self._by_bytes.get(data)

    def _longest(self, data: bytes) -> list[int]:
        found: list[int] = []
        while data:
            lengths = range(min(self._max_length, len(data)), 0, -1)
            token = next((self._by_bytes[data[:n]] for n in lengths if data[:n] in self._by_bytes), None)
            if token is None:
                break
            found.append(token)
            data = data[len(self.tokens[token]) :]
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {data: token for token, data in enumerate(self.tokens) if data and token not in self.special}

    @cached_property
    def spells_every_byte(self) -> bool:
        """Return whether the vocabulary's tokens can spell every text."""
        return all(bytes([byte]) in self._by_bytes for byte in range(256))

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Return the tokens that consist of one byte, by byte."""
        return {byte: token for byte in range(256) if (token := self._by_bytes.get(bytes([byte]))) is not None}

    @cached_property
    def _max_length(self) -> int:
        return max(map(len, self._by_bytes), default=1)


class _Wrapper:
    """The object that `llguidance.TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary, eos: int) -> None:
        self.eos_token_id = eos
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special)
        self._encode = vocabulary.encode
        self._short = lru_cache(_MAX_SPELLED)(lambda text: tuple(vocabulary.encode(text)))

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return list(self._short(data)) if len(data) <= _MAX_SHORT else self._encode(data)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos: Iterable[int] = ()) -> GrammarVocabulary:
    """Return the vocabulary of a model: the tokenizer's tokens, padded to the width of its logits rows. A text ends
    with one of the tokens `eos`, or with the tokenizer's own end tokens."""
    # An anchor before the text shows how it is spelled inside a document: some tokenizers put a space before the first
    # word of every text.
    anchor = "\n"
    lead = tokenizer.encode(anchor, add_special_tokens=False)

    def encode(text: str) -> list[int]:
        tokens = tokenizer.encode(anchor + text, add_special_tokens=False)
        if tokens[: len(lead)] == lead:
            return tokens[len(lead) :]
        return tokenizer.encode(text, add_special_tokens=False)

    spelled = min(tokenizer.vocab_size, vocab_size)
    return GrammarVocabulary(
        [tokenizer.token_bytes(token) for token in range(spelled)],
        (*eos, *tokenizer.eos_token_ids),
        tokenizer.special_token_ids,
        encode,
        vocab_size,
    )


def load_llguidance() -> Any:
    """Return the module `llguidance`. Raises `UnsupportedFeature` if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UnsupportedFeature("constraints need llguidance, which is not installed", "constraint") from None
    return llguidance
