"""Writes and reads masks in shared memory, as rows of the bias matrix.

In dialect 1, the region has dense f32 rows from offset 0. In dialect 2, the region has a header, a table of row owners,
then the rows. Inside bridle a mask is a row of bits, and 1 allows a token. Token i is bit `i % 32` of little-endian
word `i // 32`. This module converts bits to the type of the region with table look-ups, eight tokens at a time.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bridle.errors import ProtocolError

MAGIC = 0xF01291B7
FREE = 0xFFFFFFFF
HEADER_SIZE = 64
#: Element types, each with its number in the header.
DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "bool": 4}
_KINDS: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
}
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """The layout of a mask region in dialect 2. `row_bytes` is the number of bytes from one row to the next;
    `row_elements` is the row length in tokens."""

    dtype: str
    vocab_size: int
    row_elements: int
    row_bytes: int
    num_rows: int
    first_row: int

    @classmethod
    def of(cls, dtype: str, vocab_size: int, region_size: int) -> MaskLayout:
        """Return the layout of a region of `region_size` bytes. Raises `ProtocolError` if the region is too small for
        one row."""
        if dtype not in DTYPES:
            raise ProtocolError(f"the mask type is {dtype!r}; must be one of {', '.join(DTYPES)}")
        elements = (vocab_size + 1000) // 64 * 64
        size = 4 * (elements + 31) // 32 if dtype == "bool" else elements * _ELEMENT_BYTES[dtype]
        rows = (region_size - 128) // (size + 8)
        if rows < 1:
            raise ProtocolError(
                f"the shared memory of masks has {region_size} bytes; it has no room for one row of {size} bytes"
            )
        return cls(dtype, vocab_size, elements, size, rows, HEADER_SIZE + 4 * ((rows + 3) // 4 * 4))


class MaskWriter:
    """Writes masks to the region, for the runtime. Rows are allocated in order, and all rows are released when the next
    step begins."""

    def __init__(self, region: Any, layout: MaskLayout) -> None:
        self.layout = layout
        self._region = memoryview(region)
        self._table = _table(layout.dtype)
        self.num_used = 0
        header = struct.pack("<4I", MAGIC, layout.row_bytes, layout.num_rows, DTYPES[layout.dtype])
        self._region[:16] = header
        owners = 4 * layout.num_rows
        self._region[HEADER_SIZE : HEADER_SIZE + owners] = b"\xff" * owners

    def release(self) -> None:
        """Release all rows."""
        owners = 4 * self.num_used
        self._region[HEADER_SIZE : HEADER_SIZE + owners] = b"\xff" * owners
        self.num_used = 0

    @property
    def num_free(self) -> int:
        return self.layout.num_rows - self.num_used

    def write(self, bits: bytes | memoryview, owner: int) -> int:
        """Store a mask, given as bits, in a free row. Returns the number of the row. The caller must have checked
        `num_free`."""
        row = self.num_used
        self.num_used = row + 1
        layout = self.layout
        struct.pack_into("<I", self._region, HEADER_SIZE + 4 * row, owner & 0x7FFFFFFF)
        start = layout.first_row + row * layout.row_bytes
        target = self._region[start : start + layout.row_bytes]
        packed = np.frombuffer(bits, np.uint8, count=(layout.vocab_size + 7) // 8)
        fill_row(target, packed, layout.vocab_size, self._table)
        return row

    def close(self) -> None:
        self._region.release()


def fill_row(target: memoryview, packed: Array, vocab_size: int, table: Array | None) -> None:
    """Write one row. `packed` has the mask's bits: `[ceil(V/8)]` u8. If `table` is None, the row consists of bits; else
    `table` has the values for each byte: `[256, 8]`."""
    if table is None:
        whole, rest = divmod(vocab_size, 8)
        target[:whole] = packed[:whole].data
        if rest:
            target[whole] = int(packed[whole]) & ((1 << rest) - 1)
        target[len(packed) :] = bytes(len(target) - len(packed))
        return
    row = np.frombuffer(target, table.dtype)
    whole = vocab_size // 8
    np.take(table, packed[:whole], axis=0, out=row[: 8 * whole].reshape(-1, 8), mode="clip")
    rest = vocab_size - 8 * whole
    if rest:
        row[8 * whole : vocab_size] = table[packed[whole], :rest]
    row[vocab_size:] = table[0, 0]


def dense_table() -> Array:
    """Return the values of dialect 1 for each byte of bits: 0 allows a token, -100 forbids it. `[256, 8]` f32."""
    return _expand(np.float32(0.0), np.float32(-100.0), np.dtype(np.float32))


def _table(dtype: str) -> Array | None:
    """Return the values of type `dtype` for each byte of bits, or None if the type is bits."""
    if dtype == "f32":
        return _expand(0.0, -np.inf, np.dtype(np.float32))
    if dtype == "f16":
        return _expand(0.0, -np.inf, np.dtype(np.float16))
    if dtype == "bf16":
        return _expand(0, 0xFF80, np.dtype(np.uint16))  # the bit pattern of minus infinity
    return None


def _expand(allowed: Any, forbidden: Any, dtype: np.dtype[Any]) -> Array:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.array(allowed, dtype), np.array(forbidden, dtype)).astype(dtype)


class MaskReader:
    """Reads masks from a dialect-2 region, for the engine. The layout comes from the runtime's reply, not from the
    region's header."""

    def __init__(self, region: Any) -> None:
        self._region = region

    def row(self, first: int, stride: int, index: int) -> memoryview:
        """Return the bytes of a row, of any type. Raises `ProtocolError` if the row is outside the region."""
        start = first + stride * index
        if min(first, stride, index) < 0 or start + stride > len(self._region):
            raise ProtocolError(
                f"mask row {index} ({stride} bytes from byte {start}) is outside the shared memory of masks"
            )
        return memoryview(self._region)[start : start + stride]  # no view stays, so that the region can be closed

    def bits(self, first: int, stride: int, index: int, dtype: str, vocab_size: int) -> bytes:
        """Convert a row to bits for the engine's sampler: `ceil(V/32)` words. Raises `ProtocolError` if the type of the
        row is unknown."""
        row = self.row(first, stride, index)
        size = 4 * ((vocab_size + 31) // 32)
        if dtype == "bool":
            packed = bytes(row[: (vocab_size + 7) // 8])
            return packed.ljust(size, b"\0")
        kind = _KINDS.get(dtype)
        if kind is None or len(row) < vocab_size * kind.itemsize:
            raise ProtocolError(
                f"a mask row has {len(row)} bytes of type {dtype!r}; a vocabulary of {vocab_size} tokens needs "
                "another size or type"
            )
        values = np.frombuffer(row, kind, count=vocab_size)
        return np.packbits(values == 0, bitorder="little").tobytes().ljust(size, b"\0")
