"""Builds and reads the token trie that guests walk, in the layouts of both dialects.

The trie of 128k tokens is built in a fraction of a second, because every step is one array operation over sorted
tokens. Sorted order is depth-first pre-order, so a token adds only the nodes after the prefix that it shares with its
predecessor. The layouts differ in the number of bits for a token's length.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bridle.errors import UnsupportedModel

MAGIC = 0x558B6FD3
HEADER = struct.Struct("<7I")
NO_TOKEN = 0xFFFFFF
#: Bits of the length in a token's word, by dialect: 8 for D1 and D2.0 guests, 10 from D2.1 on.
LENGTH_BITS = {1: 8, 2: 10}
#: A node with more children than this gets all 256.
_DENSE = 250
#: Longer tokens cannot be reached through the trie, because a node stores the number of levels to pop in 8 bits.
_MAX_DEPTH = 255

Array = npt.NDArray[Any]


def build_trie(tokens: Sequence[bytes], eos: int, dialect: int) -> bytes:
    """Return the blob for `aici_host_token_trie`. Special tokens have empty bytes and are not in the trie. If several
    tokens have the same bytes, the trie has the last one. Raises `UnsupportedModel` if the vocabulary exceeds the
    limits of the format."""
    if not 0 < len(tokens) < NO_TOKEN:
        raise UnsupportedModel(f"the vocabulary has {len(tokens)} tokens; the token trie holds 1 to {NO_TOKEN - 1}")
    bits = LENGTH_BITS[dialect]
    longest = (1 << bits) - 2
    kept = [token if len(token) <= longest else b"" for token in tokens]
    nodes = _build_nodes(kept)
    offsets, data = _pack(kept, bits)
    size = nodes.nbytes
    # The original writer stores the size of the nodes a second time in the field for the size of the data.
    header = HEADER.pack(MAGIC, HEADER.size, size, offsets.nbytes, size, len(tokens), eos)
    return header + nodes.tobytes() + offsets.tobytes() + data


def _pack(tokens: Sequence[bytes], bits: int) -> tuple[Array, bytes]:
    """Return start and length of each token in the concatenated bytes: u32 `[V]`."""
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    starts = np.cumsum(lengths) - lengths
    if starts[-1] + lengths[-1] >= 1 << (32 - bits):
        raise UnsupportedModel(
            f"the tokens have {starts[-1] + lengths[-1]} bytes in all; the token trie holds at most {1 << (32 - bits)}"
        )
    return (starts << bits | lengths).astype("<u4"), b"".join(tokens)


def _build_nodes(tokens: Sequence[bytes]) -> Array:
    """Return the nodes in pre-order, root first: u32 `[N, 2]`."""
    words: dict[bytes, int] = {}
    for index, token in enumerate(tokens):
        if 0 < len(token) <= _MAX_DEPTH:
            words[token] = index
    shape = _shape(words)
    extra = _dense_words(shape)
    if extra:
        for word in extra:
            words.setdefault(word, NO_TOKEN)
        shape = _shape(words)
    return _encode(shape)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The trie without its root: byte, depth (from 1) and token of each node, in pre-order, all `[N]`."""

    byte: Array
    depth: Array
    token: Array


def _shape(words: dict[bytes, int]) -> _Shape:
    ordered = sorted(words)
    count = len(ordered)
    data = np.frombuffer(b"".join(ordered), np.uint8)
    length = np.fromiter(map(len, ordered), np.int64, count)
    start = np.cumsum(length) - length
    shared = _shared_prefixes(data, start, length)  # [W]
    fresh = length - shared  # new nodes by word
    total = int(fresh.sum())
    last = np.cumsum(fresh) - 1  # the node at which a word ends
    word = np.repeat(np.arange(count), fresh)
    place = np.arange(total) - np.repeat(last - fresh + 1, fresh) + shared[word]
    token = np.full(total, NO_TOKEN, np.int64)
    token[last] = np.fromiter((words[item] for item in ordered), np.int64, count)
    return _Shape(data[start[word] + place] if total else data, place + 1, token)


def _shared_prefixes(data: Array, start: Array, length: Array) -> Array:
    """Return the length of the prefix that each sorted token shares with the token before it."""
    shared = np.zeros(len(start), np.int64)
    active = np.arange(1, len(start))
    depth = 0
    while len(active):
        active = active[(length[active] > depth) & (length[active - 1] > depth)]
        active = active[data[start[active] + depth] == data[start[active - 1] + depth]]
        depth += 1
        shared[active] = depth
    return shared


def _parents(depth: Array) -> Array:
    """Return the index of each node's parent, -1 for the root. The parent is the last node before it that is one level
    higher."""
    parent = np.full(len(depth), -1, np.int64)
    for level in range(2, int(depth.max(initial=0)) + 1):
        nodes = np.flatnonzero(depth == level)
        above = np.flatnonzero(depth == level - 1)
        parent[nodes] = above[np.searchsorted(above, nodes) - 1]
    return parent


def _dense_words(shape: _Shape) -> list[bytes]:
    """Return byte strings that complete dense nodes: a node with enough children gets a child for all 256 bytes."""
    parent = _parents(shape.depth)
    children = np.bincount(parent + 1, minlength=1)
    words: list[bytes] = []
    for node in np.flatnonzero(children > _DENSE) - 1:
        prefix = bytearray()
        while node >= 0:
            prefix.append(int(shape.byte[node]))
            node = parent[node]
        stem = bytes(reversed(prefix))
        words.extend(stem + bytes([byte]) for byte in range(256))
    return words


def _encode(shape: _Shape) -> Array:
    count = len(shape.depth) + 1
    depth = np.concatenate(([0], shape.depth))
    after = _ends(depth)  # where each subtree ends
    following = np.concatenate((depth, [1]))[after]
    pops = depth - following + 1
    pops[0] = 0
    nodes = np.empty((count, 2), "<u4")
    nodes[0, 0] = NO_TOKEN << 8 | 0xFF
    nodes[1:, 0] = shape.token << 8 | shape.byte
    nodes[:, 1] = (after - np.arange(count)) << 8 | pops
    return nodes


def _ends(depth: Array) -> Array:
    """Return the index after each node's subtree. At that index is the next node that is not deeper."""
    ends = np.empty(len(depth), np.int64)
    for level in range(int(depth.max()) + 1):
        nodes = np.flatnonzero(depth == level)
        stops = np.append(np.flatnonzero(depth <= level), len(depth))
        ends[nodes] = stops[np.searchsorted(stops, nodes, side="right")]
    return ends


# -- reading -----------------------------------------------------------------------------------------------


class TokenTrie:
    """A trie read from its blob: token bytes, and longest-match tokenization of bytes that are not text."""

    def __init__(self, blob: bytes, dialect: int) -> None:
        magic, size, nodes, offsets, _, self.vocab_size, self.eos = HEADER.unpack_from(blob)
        if magic != MAGIC or size != HEADER.size:
            raise UnsupportedModel(
                f"the data is not a token trie: its magic number is {magic:#x}, its header has {size} bytes"
            )
        self._nodes = np.frombuffer(blob, "<u4", count=nodes // 4, offset=size).reshape(-1, 2)
        self._offsets = np.frombuffer(blob, "<u4", count=offsets // 4, offset=size + nodes)
        self._data = blob[size + nodes + offsets :]
        self._bits = LENGTH_BITS[dialect]

    def token_bytes(self, token: int) -> bytes:
        word = int(self._offsets[token])
        start = word >> self._bits
        return self._data[start : start + (word & ((1 << self._bits) - 1))]

    def child(self, node: int, byte: int) -> int | None:
        """Return the index of the child of `node` for `byte`, or None."""
        index = node + 1
        end = node + (int(self._nodes[node, 1]) >> 8)
        while index < end:
            if int(self._nodes[index, 0]) & 0xFF == byte:
                return index
            index += int(self._nodes[index, 1]) >> 8
        return None

    def tokenize(self, data: bytes) -> list[int]:
        """Tokenize bytes greedily: each token is the longest that fits. A byte that starts no token is left out."""
        result: list[int] = []
        position = 0
        while position < len(data):
            token, length = self._longest(data, position)
            if token is not None:
                result.append(token)
            position += length
        return result

    def _longest(self, data: bytes, position: int) -> tuple[int | None, int]:
        best: tuple[int | None, int] = (None, 1)
        node: int | None = 0
        for length, byte in enumerate(data[position:], 1):
            node = self.child(node, byte) if node is not None else None
            if node is None:
                break
            token = int(self._nodes[node, 0]) >> 8
            if token != NO_TOKEN:
                best = (token, length)
        return best
