"""Converts KV blocks to 8 bits, which makes a KV store smaller. Each head of a token has a scale.

The error of a value is at most half a step of its scale, 1/254 of the largest value of its head. Recurrent states are
not converted to 8 bits, because rounding errors would add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridle.engine.interfaces import KVBlocks
from bridle.kv_store.records import Buffer, Snapshot, bytes_of

_Floats = NDArray[np.float32]
_SCALE = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Heads:
    """A part of a block: `count` head vectors, each of `width` values of 2 or 4 bytes."""

    count: int
    width: int


class Int8Codec:
    """Encoder and decoder of blocks that consist of `parts`. Values have the type `dtype`: float32, float16 or
    bfloat16."""

    def __init__(self, parts: Sequence[Heads], dtype: str) -> None:
        self._dtype = dtype
        self._item_size = 4 if dtype == "float32" else 2
        #: Adjacent parts whose vectors have the same width.
        self._runs = [Heads(sum(each.count for each in run), width) for width, run in groupby(parts, lambda p: p.width)]
        self.num_bytes = sum(run.count * (run.width + _SCALE.itemsize) for run in self._runs)

    def encode(self, block: Buffer) -> bytes:
        """Encode a block in 8 bits. Adjacent parts with vectors of one width are encoded together: first their values,
        then their scales."""
        pieces, at = [], 0
        for run in self._runs:
            size = run.count * run.width * self._item_size
            rows = _widen(np.frombuffer(block, np.uint8, size, at), self._dtype).reshape(run.count, run.width)
            scales = np.maximum(np.abs(rows).max(axis=1) / np.float32(127), np.float32(1e-12))
            pieces += [np.rint(rows / scales[:, None]).astype(np.int8).tobytes(), scales.astype(_SCALE).tobytes()]
            at += size
        return b"".join(pieces)

    def decode(self, data: memoryview) -> bytes:
        """Decode an 8-bit block to the bytes of a block with values of the original type."""
        pieces, at = [], 0
        for run in self._runs:
            size = run.count * run.width
            numbers = np.frombuffer(data, np.int8, size, at).reshape(run.count, run.width)
            scales = np.frombuffer(data, _SCALE, run.count, at + size)
            pieces.append(_narrow(numbers.astype(np.float32) * scales[:, None], self._dtype))
            at += size + run.count * _SCALE.itemsize
        return b"".join(pieces)


def _widen(data: NDArray[np.uint8], dtype: str) -> _Floats:
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(dtype).astype(np.float32)


def _narrow(numbers: _Floats, dtype: str) -> bytes:
    if dtype == "bfloat16":  # round to the nearest value, ties to even
        bits = numbers.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    return numbers.astype(dtype).tobytes()


class _Encoded:
    """A snapshot of a block, which is encoded when it is read, in the reading thread."""

    def __init__(self, block: Buffer | Snapshot, num_bytes: int, codec: Int8Codec) -> None:
        self._block, self._num_bytes, self._codec = block, num_bytes, codec

    def copy_into(self, memory: memoryview) -> None:
        memory[:] = self._codec.encode(bytes_of(self._block, self._num_bytes))


class Int8Blocks:
    """Implements `bridle.engine.interfaces.KVBlocks` in 8 bits over the blocks of another `KVBlocks`."""

    def __init__(self, exact: KVBlocks, codec: Int8Codec) -> None:
        self._exact, self._codec = exact, codec
        self.block_bytes, self.state_bytes = codec.num_bytes, exact.state_bytes
        self.read_state, self.write_state = exact.read_state, exact.write_state

    def identity(self) -> str:
        return f"{self._exact.identity()} int8"

    def read_block(self, block: int) -> Snapshot:
        return _Encoded(self._exact.read_block(block), self._exact.block_bytes, self._codec)

    def write_block(self, block: int, data: memoryview) -> None:
        self._exact.write_block(block, memoryview(self._codec.decode(data)))

    def __getattr__(self, name: str) -> Any:  # for example `memory` of the host, if blocks are on a device
        return getattr(self._exact, name)
