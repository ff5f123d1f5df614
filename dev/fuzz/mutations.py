"""Damages examples: flips bits and bytes, sets numbers to extreme values, moves pieces, truncates files. The same seed
gives the same damaged example."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Sequence

#: Values at which sizes, counts and offsets often cause errors.
_EDGES = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    (1 << 62),
    (1 << 63),
    (1 << 64) - 1,
)
_WORDS = (
    b"-1",
    b"0",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b'""',
    b"18446744073709551616",
    b"\\ud800",
    b"\xff",
)
_NUMBER = re.compile(rb"-?\d+")
_MAX_BYTES = 1 << 20


def mutate(examples: Sequence[bytes], seed: int) -> bytes:
    """Return a damaged example; one in fifty examples stays undamaged."""
    chance = random.Random(seed)
    data = bytearray(chance.choice(examples))
    for _ in range(0 if chance.random() < 0.02 else chance.choice((1, 1, 1, 2, 3, 8))):
        chance.choice(_ACTS)(data, chance, examples)
    return bytes(data[:_MAX_BYTES])


def _place(data: bytearray, chance: random.Random) -> int:
    """Return a random position; positions near the beginning, where headers are, are more probable."""
    return chance.randrange(min(len(data), chance.choice((32, 256, 1 << 30))) or 1)


def _flip(data: bytearray, chance: random.Random, examples: Sequence[bytes]) -> None:
    if data:
        data[_place(data, chance)] ^= 1 << chance.randrange(8)


def _overwrite(data: bytearray, chance: random.Random, examples: Sequence[bytes]) -> None:
    at, size = _place(data, chance), chance.choice("BHIQ")
    order = chance.choice("<>")
    value = chance.choice(_EDGES) & ((1 << (8 * struct.calcsize(size))) - 1)
    data[at : at + struct.calcsize(size)] = struct.pack(order + size, value)


def _cut(data: bytearray, chance: random.Random, examples: Sequence[bytes]) -> None:
    at = _place(data, chance)
    del data[at : at + chance.choice((1, 4, 64, len(data)))]


def _repeat(data: bytearray, chance: random.Random, examples: Sequence[bytes]) -> None:
    at = _place(data, chance)
    piece = bytes(data[at : at + chance.choice((1, 8, 64))])
    data[at:at] = piece * chance.choice((1, 2, 50, 2_000))


def _join(data: bytearray, chance: random.Random, examples: Sequence[bytes]) -> None:
    other = chance.choice(examples)
    data[_place(data, chance) :] = other[_place(bytearray(other), chance) :]


def _word(data: bytearray, chance: random.Random, examples: Sequence[bytes]) -> None:
    at = _place(data, chance)
    data[at : at + chance.choice((0, 1, 4))] = chance.choice(_WORDS)


def _number(data: bytearray, chance: random.Random, examples: Sequence[bytes]) -> None:
    found = [match.span() for match in _NUMBER.finditer(data)][:200]
    if found:
        begin, end = chance.choice(found)
        data[begin:end] = str(chance.choice((*_EDGES, -1, -(1 << 63)))).encode()


_ACTS = (_flip, _flip, _overwrite, _overwrite, _cut, _repeat, _join, _word, _number)
