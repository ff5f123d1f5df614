"""Reads one GGUF file. The file's header is checked before anything else is read. Every length, count and offset must
be within a limit and within the file, and every type must be known. So a damaged or malicious file gives a clear error,
and never a read outside the file. Files are not mapped into memory, so a file truncated during use causes an error
instead of ending the process. This module is independent of model families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from bridle.errors import UnsupportedModel
from bridle.gguf.byte_reader import U64, ByteReader, PlainFile
from bridle.gguf.format import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAGIC,
    SCALARS,
    STRING,
    TENSOR_TYPES,
    VERSIONS,
    TensorType,
)
from bridle.safe_repr import short_repr

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME = 1 << 10  # bytes in the name of a key or a tensor
MAX_STRING = 1 << 26  # bytes in a value
MAX_ITEMS = 1 << 24  # items in a list
MAX_SIDES = 4
MAX_SIDE = 1 << 40
MAX_ALIGNMENT = 1 << 16

_SCALARS = {number: Struct(f"<{code}") for number, code in SCALARS.items()}
_ARRAY_TYPES = {number: np.dtype(f"<{code}") for number, code in SCALARS.items() if number != BOOL}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The type, shape and offset of a tensor in a GGUF file. `shape` has rows first, as usual in Python; the file has
    the opposite order."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    start: int  # offset in the file
    num_bytes: int

    @property
    def num_values(self) -> int:
        return prod(self.shape)


class GgufFile:
    """An open file: `metadata` by key, `tensors` by name. Lists of numbers in the metadata are numpy arrays; other
    lists are Python lists."""

    def __init__(
        self, file: PlainFile, metadata: dict[str, Any], tensors: dict[str, TensorEntry], header: bytes
    ) -> None:
        self.path = file.path
        self.metadata: Mapping[str, Any] = metadata
        self.tensors: Mapping[str, TensorEntry] = tensors
        self.header = header  # the bytes before the tensors
        self._file = file

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a copy of a tensor's bytes, [rows, bytes per row]. Raises `UnsupportedModel` if the file was truncated
        after it was opened."""
        entry = self.tensors[name]
        rows = np.empty(entry.num_bytes, np.uint8)
        if self._file.read_into(rows.data, entry.start) < entry.num_bytes:
            raise UnsupportedModel(f"{self.path} was cut off while it was read: tensor {short_repr(name)} is not whole")
        return rows.reshape(prod(entry.shape[:-1]), -1)


def open_gguf(path: Path) -> GgufFile:
    """Open a file and check its header. Raises `UnsupportedModel` with the reason."""
    file = PlainFile(path)
    scan = ByteReader(file)
    num_tensors, num_keys = _read_counts(scan)
    metadata = _read_metadata(scan, num_keys)
    tensors = _read_tensors(scan, num_tensors, _alignment(scan, metadata))
    first = min((entry.start for entry in tensors.values()), default=scan.at)
    return GgufFile(file, metadata, tensors, scan.read(0, min(first, scan.at + MAX_ALIGNMENT)))


def _read_counts(scan: ByteReader) -> tuple[int, int]:
    magic = scan.read_next(4, "the magic")
    if magic != MAGIC:
        raise UnsupportedModel(f"{scan.path} is not a GGUF file: it begins with {magic!r}")
    version = scan.u32("the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise UnsupportedModel(f"{scan.path} is a GGUF file of a big-endian machine, which bridle does not read")
        raise UnsupportedModel(f"{scan.path} is of GGUF version {version}; versions 2 and 3 are read")
    num_tensors, num_keys = scan.u64("the number of tensors"), scan.u64("the number of keys")
    if num_tensors > MAX_TENSORS:
        raise scan.fail(f"the header claims {num_tensors} tensors; at most {MAX_TENSORS} are read")
    if num_keys > MAX_KEYS:
        raise scan.fail(f"the header claims {num_keys} metadata keys; at most {MAX_KEYS} are read")
    return num_tensors, num_keys


def _read_metadata(scan: ByteReader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(count):
        key = scan.text(MAX_NAME, f"the name of key {number}")
        if key in metadata:
            raise scan.fail(f"key {short_repr(key)} occurs twice")
        kind = scan.u32(f"the type of {short_repr(key)}")
        metadata[key] = _read_list(scan, key) if kind == ARRAY else _read_value(scan, kind, key)
    return metadata


def _read_value(scan: ByteReader, kind: int, key: str) -> Any:
    if kind == STRING:
        return scan.text(MAX_STRING, short_repr(key))
    form = _SCALARS.get(kind)
    if form is None:
        raise scan.fail(f"key {short_repr(key)} has the unknown type {kind}")
    value = scan.read_next(form.size, short_repr(key))
    if kind == BOOL and value[0] > 1:
        raise scan.fail(f"key {short_repr(key)} is {value[0]}, which is neither true nor false")
    return form.unpack(value)[0]


def _read_list(scan: ByteReader, key: str) -> Any:
    kind, count = scan.u32(f"the type of {short_repr(key)}"), scan.u64(f"the length of {short_repr(key)}")
    if count > MAX_ITEMS:
        raise scan.fail(f"key {short_repr(key)} has {count} items; at most {MAX_ITEMS} are read")
    if kind == STRING:
        return _read_texts(scan, count, short_repr(key))
    if kind == BOOL:
        return [byte != 0 for byte in scan.read_next(count, short_repr(key))]
    form = _ARRAY_TYPES.get(kind)
    if form is None:
        raise scan.fail(f"key {short_repr(key)} is a list of type {kind}, which is not supported")
    return np.frombuffer(scan.read_next(count * form.itemsize, short_repr(key)), form)


def _read_texts(scan: ByteReader, count: int, what: str) -> list[str]:
    """Read a list of strings. Vocabularies have hundreds of thousands of strings, so the function is one tight loop
    over bytes in memory."""
    if count * 8 > scan.size - scan.at:
        raise scan.fail(f"{what} has {count} items, but only {scan.size - scan.at} bytes of the file are left")
    size, base, at = scan.size, scan.at, 0
    data = scan.stretch(base, 0, what)
    unpack = U64.unpack_from
    texts = []
    for _ in range(count):
        if at + 8 > len(data):
            base, at, data = base + at, 0, scan.stretch(base + at, 8, what)
        (length,) = unpack(data, at)
        at += 8
        if length > len(data) - at:
            if length > size - base - at:
                raise scan.fail(
                    f"{what} has a string of {length} bytes at byte {base + at}, but the file has {size} bytes"
                )
            base, at, data = base + at, 0, scan.stretch(base + at, length, what)
        texts.append(data[at : at + length].decode("utf-8", "replace"))
        at += length
    scan.at = base + at
    return texts


def _alignment(scan: ByteReader, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise scan.fail(f"general.alignment is {short_repr(value)}; must be a power of two up to {MAX_ALIGNMENT}")
    return value


def _read_tensors(scan: ByteReader, count: int, alignment: int) -> dict[str, TensorEntry]:
    found: list[tuple[str, TensorType, tuple[int, ...], int]] = []
    for number in range(count):
        name = scan.text(MAX_NAME, f"the name of tensor {number}")
        found.append((name, *_read_entry(scan, short_repr(name))))
    base = -(-scan.at // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for name, kind, shape, offset in found:
        if name in entries:
            raise scan.fail(f"tensor {short_repr(name)} occurs twice")
        if offset % alignment:
            raise scan.fail(
                f"tensor {short_repr(name)} begins at byte {offset} of the data; it must be a multiple of {alignment}"
            )
        size = prod(shape) // kind.values * kind.size
        if base + offset + size > scan.size:
            raise scan.fail(
                f"tensor {short_repr(name)} ends at byte {base + offset + size}, but the file has {scan.size} bytes"
            )
        entries[name] = TensorEntry(name, kind, shape, base + offset, size)
    _check_apart(scan, entries)
    return entries


def _read_entry(scan: ByteReader, name: str) -> tuple[TensorType, tuple[int, ...], int]:
    sides = scan.u32(f"tensor {name}")
    if not 1 <= sides <= MAX_SIDES:
        raise scan.fail(f"tensor {name} has {sides} dimensions; 1 to {MAX_SIDES} are read")
    shape = tuple(scan.u64(f"tensor {name}") for _ in range(sides))
    if any(not 1 <= side <= MAX_SIDE for side in shape):
        raise scan.fail(f"tensor {name} has shape {shape}; each dimension must be 1 to {MAX_SIDE}")
    number = scan.u32(f"tensor {name}")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise UnsupportedModel(f"{scan.path}: tensor {name} has the unknown type {number}")
    if shape[0] % kind.values:
        raise scan.fail(f"tensor {name} has rows of {shape[0]} values; {kind.name} needs a multiple of {kind.values}")
    return kind, shape[::-1], scan.u64(f"tensor {name}")


def _check_apart(scan: ByteReader, entries: Mapping[str, TensorEntry]) -> None:
    """Raise an error if two tensors overlap in the file."""
    end, before = 0, ""
    for entry in sorted(entries.values(), key=lambda entry: entry.start):
        if entry.start < end:
            raise scan.fail(f"tensors {short_repr(before)} and {short_repr(entry.name)} overlap")
        end, before = entry.start + entry.num_bytes, entry.name
