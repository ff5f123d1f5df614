"""The keyed green-list watermark: the rule that says which tokens are green, and the test of a text for the watermark.

A secret and the last few tokens seed a hash of every token. A share `gamma` of all tokens is green (Kirchenbauer et
al., arXiv 2301.10226). Each token is green independently of other tokens, so one token can be tested without computing
the whole green list. The sampler computes the green tokens in `bridle.model.sampling.watermark`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bridle.errors import InvalidRequest

#: Odd constants by which hashes are multiplied.
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
FACTOR = 0xD6E8FEB86659FD93
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4_096
_MASK64 = (1 << 64) - 1


def read_key(path: Path | str) -> str:
    """Read the secret in a file, and return the digits of its digest in hexadecimal. Raises `InvalidRequest` if the
    file cannot be read, or if its content is too short or too long."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise InvalidRequest(f"key_file: {path} cannot be read: {error.strerror or error}", "key_file") from None
    if not MIN_KEY_BYTES <= len(secret) <= MAX_KEY_BYTES:
        message = f"key_file: {path} has {len(secret)} bytes; a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES}. "
        raise InvalidRequest(message + "Make one with `openssl rand -hex 32`.", "key_file")
    return hashlib.sha256(secret).hexdigest()


def seed_of(key: str, last: Sequence[int]) -> int:
    """Return the 64-bit seed of the green list that applies after the tokens `last`."""
    data = b"".join(token.to_bytes(8, "little") for token in last)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=bytes.fromhex(key)).digest(), "little")


def hash_of(token: int) -> int:
    """Return the 64-bit hash of a token, which is the same for all seeds (the finalizer of SplitMix64)."""
    value = ((token + 1) * GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * FIRST) & _MASK64
    value = ((value ^ (value >> 27)) * SECOND) & _MASK64
    return value ^ (value >> 31)


def limit_of(gamma: float) -> int:
    """Return the signed 64-bit integer below which a share `gamma` of all signed 64-bit integers lies."""
    return min(int(gamma * (1 << 64)) - (1 << 63), (1 << 63) - 1)


def is_green(seed: int, token: int, gamma: float) -> bool:
    """Return whether a token is in the green list of a seed."""
    value = ((hash_of(token) ^ seed) * FACTOR) & _MASK64
    return value - ((value >> 63) << 64) < limit_of(gamma)


@dataclass(frozen=True, slots=True)
class WatermarkTest:
    """The result of a test: `num_green` of the `num_scored` tokens are green. `z` is the number of green tokens above
    the expected number, in standard deviations. `p_value` is the probability that a text without the watermark has at
    least as many green tokens."""

    num_scored: int
    num_green: int
    z: float
    p_value: float


def detect(tokens: Sequence[int], key: str, gamma: float, context: int = 1) -> WatermarkTest:
    """Test a text for the watermark. A token is scored only once after the same `context` tokens, because repetitions
    are no further evidence."""
    seen = {tuple(tokens[at - context : at + 1]) for at in range(context, len(tokens))}
    num_green = sum(is_green(seed_of(key, each[:-1]), each[-1], gamma) for each in seen)
    num = len(seen)
    spread = math.sqrt(num * gamma * (1.0 - gamma))
    z = (num_green - num * gamma) / spread if spread else 0.0
    return WatermarkTest(num, num_green, z, _tail(num_green, num, gamma))


def _tail(least: int, num: int, share: float) -> float:
    """Return the probability of at least `least` successes in `num` trials with success probability `share`."""
    if least <= 0 or share >= 1.0:
        return 1.0
    logs = [
        math.lgamma(num + 1)
        - math.lgamma(k + 1)
        - math.lgamma(num - k + 1)
        + k * math.log(share)
        + (num - k) * math.log1p(-share)
        for k in range(least, num + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))
