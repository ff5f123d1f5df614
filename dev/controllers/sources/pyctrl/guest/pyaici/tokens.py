"""Tokens, text, and sets of tokens.

A `TokenSet` that a constraint fills stays on the host's side as long as nobody looks into it: what crosses the
border is then a number, not a bit for each token of the vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import cache

from wit_world.imports import host

_MAX_SHOWN = 10
#: A token's place in the vocabulary.
Token = int


def tokenize(text: str | bytes) -> list[int]:
    """The tokens of a text, without any special ones in front."""
    if isinstance(text, str):
        return list(host.tokenize(text))
    if not isinstance(text, (bytes, bytearray)):
        raise TypeError(f"tokenize wants text or bytes, not {type(text).__name__}")
    try:
        return list(host.tokenize(text.decode()))
    except UnicodeDecodeError:
        return list(host.tokenize_bytes(bytes(text)))


def detokenize(tokens: Iterable[int]) -> bytes:
    """The bytes of tokens; special ones have none."""
    return b"".join(map(token_bytes, tokens))


@cache
def token_bytes(token: int) -> bytes:
    """The bytes of one token."""
    if not 0 <= token < vocab_size():
        raise ValueError(f"token {token} is outside the vocabulary of {vocab_size()}")
    return bytes(host.token_bytes(token))


@cache
def vocab_size() -> int:
    """Number of tokens."""
    return host.vocab_size()


@cache
def eos_token() -> int:
    """The token that ends a text."""
    return host.eos_token()


def token_repr(token: int) -> str:
    """A token for people to read."""
    data = token_bytes(token)
    if not data:
        return "<eos>" if token == eos_token() else f"<{token}>"
    return repr(data.decode(errors="backslashreplace"))


def tokens_repr(tokens: Iterable[int]) -> str:
    """Tokens for people to read."""
    return "[" + ", ".join(map(token_repr, tokens)) + "]"


class TokenSet:
    """A sequence of bool, one for each token; empty at first."""

    def __init__(self) -> None:
        self._bits: bytearray | None = bytearray((vocab_size() + 7) // 8)
        self._is_all = False
        self._mask = 0  # its name on the host's side, while the call lasts in which it was made

    def __len__(self) -> int:
        return vocab_size()

    def __getitem__(self, token: int) -> bool:
        token = self._place(token)
        return bool(self._own()[token >> 3] >> (token & 7) & 1)

    def __setitem__(self, token: int, allowed: bool) -> None:
        token = self._place(token)
        bits = self._own()
        if allowed:
            bits[token >> 3] |= 1 << (token & 7)
        else:
            bits[token >> 3] &= ~(1 << (token & 7))

    def __iter__(self) -> Iterator[bool]:
        bits = self._own()
        return (bool(bits[token >> 3] >> (token & 7) & 1) for token in range(vocab_size()))

    def __repr__(self) -> str:
        count = self.num_set()
        if count == len(self):
            return "{all}"
        shown = [token_repr(token) for token in self.tokens(_MAX_SHOWN)]
        return "{" + ", ".join(shown) + (f", ... {count} of {len(self)}" if count > len(shown) else "") + "}"

    def set_all(self, allowed: bool) -> None:
        """Every token, or none."""
        self._mask, self._is_all = 0, allowed
        self._bits = None if allowed else bytearray((vocab_size() + 7) // 8)

    def num_set(self) -> int:
        """How many tokens are in the set."""
        return len(self) if self._is_all else int.from_bytes(self._own(), "little").bit_count()

    def is_empty(self) -> bool:
        """Whether nothing is in the set; costs little."""
        return not (self._mask or self._is_all or (self._bits is not None and any(self._bits)))

    def tokens(self, limit: int | None = None) -> list[int]:
        """The tokens in the set, at most `limit` of them."""
        found: list[int] = []
        for place, byte in enumerate(self._own()):
            while byte and (limit is None or len(found) < limit):
                low = byte & -byte
                found.append(8 * place + low.bit_length() - 1)
                byte ^= low
        return found

    # -- between guest and host ----------------------------------------------------------------------------

    def keep_mask(self, mask: int) -> None:
        """Be what a mask of this call is; 0 is the empty one."""
        self.set_all(False)
        if mask:
            self._bits, self._mask = None, mask
            _distant.add(self)

    def lower(self) -> int:
        """A mask of this call that is this set."""
        if self._mask:
            return self._mask
        if self._is_all:
            return host.allow_all()
        bits = self._own()
        if int.from_bytes(bits, "little").bit_count() <= _MAX_SHOWN:
            return host.allow(self.tokens())
        return host.allow_bits(bits.hex())

    def _own(self) -> bytearray:
        """The bits, fetched if they are elsewhere. They may change now."""
        if self._bits is None:
            size = (vocab_size() + 7) // 8
            self._bits = (
                bytearray.fromhex(host.mask_bits(self._mask))[:size] if self._mask else bytearray(b"\xff" * size)
            )
            if vocab_size() % 8:
                self._bits[-1] &= (1 << vocab_size() % 8) - 1
        self._mask, self._is_all = 0, False
        return self._bits

    def _place(self, token: int) -> int:
        if not -vocab_size() <= token < vocab_size():
            raise IndexError(f"token {token} is outside the vocabulary of {vocab_size()}")
        return token % vocab_size()


#: Sets whose bits are on the host's side.
_distant: weakref.WeakSet[TokenSet] = weakref.WeakSet()


def end_call() -> None:
    """Masks are forgotten after each call: bring home the sets that somebody still holds."""
    for one in list(_distant):
        one._own()
    _distant.clear()


def all_tokens() -> TokenSet:
    """The set of every token."""
    everything = TokenSet()
    everything.set_all(True)
    return everything
