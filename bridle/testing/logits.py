"""The scripted model: its logits depend only on the tokens read so far.

Each position p of a sequence has a *digest*: a 64-bit hash of the adapter and of all tokens up to p. The digest stands
for the keys and values that a real model keeps for position p. A logits row mixes the digests of all positions up to
its own. So one wrong slot anywhere in the KV cache gives another logits row. Logits are small integers, so they are
exact in every float type. A test can give a function `next_token`, which chooses every token in place of the hash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Digests = NDArray[np.uint64]
Logits = NDArray[np.float64]
NextToken = Callable[[tuple[int, ...]], "int | Sequence[float]"]

_MASK = (1 << 64) - 1
#: Logit of the token that `next_token` returns. All others have 0, so no temperature up to 1 samples them.
CERTAIN = 60.0


def mix(value: int) -> int:
    """Return a 64-bit number in which every bit depends on all bits of `value` (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(key: int, draw: int) -> float:
    """Return random number `draw` of `key`, in [0, 1). The random number is computed only from `key` and `draw`,
    without any state."""
    return (mix(mix(key & _MASK) + draw & _MASK) >> 11) * 2.0**-53


class ScriptedModel:
    """Computes logits over `vocab_size` tokens from a prefix. `spread` is the number of different logit values."""

    def __init__(self, vocab_size: int, seed: int = 0, next_token: NextToken | None = None, spread: int = 16) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.next_token = next_token
        self.spread = spread
        steps = (mix(seed * 2 + 1) + 0x9E3779B97F4A7C15 * token for token in range(vocab_size))
        self._token_salts = np.array([step & _MASK for step in steps], dtype=np.uint64)  # [V]

    def root(self, adapter: str | None) -> int:
        """Return the digest before the first token, for sequences that use `adapter`."""
        if adapter is None:
            return mix(self.seed)
        return mix(self.seed ^ int.from_bytes(adapter.encode()[:64], "little") % _MASK)

    def extend(self, digest: int, tokens: Sequence[int]) -> list[int]:
        """Return the digests of `tokens`, which follow the position with the digest `digest`."""
        out = []
        for token in tokens:
            digest = mix(digest ^ (token * 0xD6E8FEB86659FD93 + 1 & _MASK))
            out.append(digest)
        return out

    def rows(self, tokens: Tokens, digests: Digests, num_rows: int) -> list[Logits]:
        """Return the logits at the last `num_rows` positions, from the `tokens` and `digests` [n] that were read from
        the KV."""
        length = len(tokens)
        if self.next_token is not None:
            return [self._told(tokens[: end + 1]) for end in range(length - num_rows, length)]
        weights = np.arange(1, 2 * length, 2, dtype=np.uint64)  # [n], odd: the order of positions matters
        contexts = np.cumsum(digests * weights, dtype=np.uint64)  # [n]
        return [self._hashed(context) for context in contexts[length - num_rows :]]

    def row_after(self, tokens: Sequence[int], adapter: str | None = None) -> Logits:
        """Return the logits after `tokens`, computed only from the tokens."""
        digests = self.extend(self.root(adapter), tokens)
        return self.rows(np.array(tokens, dtype=np.int64), np.array(digests, dtype=np.uint64), 1)[0]

    def _hashed(self, context: np.uint64) -> Logits:
        value = self._token_salts ^ context  # [V]
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
        return (value % np.uint64(self.spread)).astype(np.float64) - self.spread // 2

    def _told(self, prefix: Tokens) -> Logits:
        assert self.next_token is not None
        answer = self.next_token(tuple(prefix.tolist()))
        if isinstance(answer, int):
            row = np.zeros(self.vocab_size)
            row[answer] = CERTAIN
            return row
        row = np.asarray(answer, dtype=np.float64)
        if row.shape != (self.vocab_size,):
            raise ValueError(f"next_token gave {row.shape[0]} logits; the vocabulary has {self.vocab_size}")
        return row.copy()
