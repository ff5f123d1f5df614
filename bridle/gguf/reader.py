"""One GGUF file, mapped, with a header that was checked against the file before anything else is read.

Every length, count, offset and type is compared with the bytes that are really there, and with a bound. So a damaged or
hostile file gives one clear sentence, and never a read outside of the file. This module knows nothing of models.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from bridle.errors import UnsupportedModel
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
from bridle.shown import shown

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME = 1 << 10  # bytes in the name of a key or a tensor
MAX_STRING = 1 << 26  # bytes in a value
MAX_ITEMS = 1 << 24  # in a list
MAX_SIDES = 4
MAX_SIDE = 1 << 40
MAX_ALIGNMENT = 1 << 16

_U32, _U64 = Struct("<I"), Struct("<Q")
_SCALARS = {number: Struct(f"<{code}") for number, code in SCALARS.items()}
_ARRAY_TYPES = {number: np.dtype(f"<{code}") for number, code in SCALARS.items() if number != BOOL}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of a tensor. `shape` has rows first, as everywhere in Python; the file has the opposite order."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    start: int  # in the file
    num_bytes: int

    @property
    def num_values(self) -> int:
        return prod(self.shape)


class GgufFile:
    """A mapped file: `metadata` by key, `tensors` by name. Numeric lists are numpy arrays, others Python lists."""

    def __init__(self, path: Path, data: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, TensorEntry]) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = metadata
        self.tensors: Mapping[str, TensorEntry] = tensors
        self._data = data

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A tensor's bytes, [rows, bytes per row], a view of the file."""
        entry = self.tensors[name]
        flat = np.frombuffer(self._data, np.uint8, entry.num_bytes, entry.start)
        return flat.reshape(prod(entry.shape[:-1]), -1)

    @property
    def header(self) -> memoryview:
        """The bytes in front of the tensors."""
        starts = [entry.start for entry in self.tensors.values()]
        return memoryview(self._data)[: min(starts, default=len(self._data))]


def open_gguf(path: Path) -> GgufFile:
    """Map a file and check its header. Raises `UnsupportedModel` with what is wrong."""
    data = _map(path)
    scan = _Scan(path, data)
    num_tensors, num_keys = _read_counts(scan)
    metadata = _read_metadata(scan, num_keys)
    return GgufFile(path, data, metadata, _read_tensors(scan, num_tensors, _alignment(scan, metadata)))


def _map(path: Path) -> mmap.mmap:
    """The whole file. Changes to the mapped memory, which nobody makes, would stay in this process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsupportedModel(f"{path} is no plain file")
        if status.st_size < 24:
            raise UnsupportedModel(f"{path} is no GGUF file: it has {status.st_size} bytes")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be mapped: {error}") from None
    finally:
        os.close(descriptor)


class _Scan:
    """A position in the file. Each step first says how many bytes it needs, and is refused if they are not there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        self.size = len(data)
        self.at = 0

    def fail(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path} is damaged: {what}")

    def skip(self, size: int, what: str) -> int:
        """Move on by `size` bytes; returns where they begin."""
        start = self.at
        if size > self.size - start:
            raise self.fail(f"{what} needs {size} bytes at byte {start}, and the file ends at {self.size}")
        self.at = start + size
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.skip(8, what))[0])

    def text(self, limit: int, what: str) -> str:
        """A string of at most `limit` bytes. Bytes that are no UTF-8 become U+FFFD."""
        size = self.u64(what)
        if size > limit:
            raise self.fail(f"{what} has {size} bytes; at most {limit} are read")
        start = self.skip(size, what)
        return self.data[start : start + size].decode("utf-8", "replace")


def _read_counts(scan: _Scan) -> tuple[int, int]:
    magic = scan.data[:4]
    if magic != MAGIC:
        raise UnsupportedModel(f"{scan.path} is no GGUF file: it begins with {magic!r}")
    scan.at = 4
    version = scan.u32("the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise UnsupportedModel(f"{scan.path} is a GGUF file of a big-endian machine, which bridle does not read")
        raise UnsupportedModel(f"{scan.path} is of GGUF version {version}; versions 2 and 3 are read")
    num_tensors, num_keys = scan.u64("the number of tensors"), scan.u64("the number of keys")
    if num_tensors > MAX_TENSORS:
        raise scan.fail(f"it claims {num_tensors} tensors; at most {MAX_TENSORS} are read")
    if num_keys > MAX_KEYS:
        raise scan.fail(f"it claims {num_keys} keys; at most {MAX_KEYS} are read")
    return num_tensors, num_keys


def _read_metadata(scan: _Scan, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(count):
        key = scan.text(MAX_NAME, f"the name of key {number}")
        if key in metadata:
            raise scan.fail(f"key {shown(key)} is there twice")
        kind = scan.u32(f"the type of {shown(key)}")
        metadata[key] = _read_list(scan, key) if kind == ARRAY else _read_value(scan, kind, key)
    return metadata


def _read_value(scan: _Scan, kind: int, key: str) -> Any:
    if kind == STRING:
        return scan.text(MAX_STRING, shown(key))
    form = _SCALARS.get(kind)
    if form is None:
        raise scan.fail(f"{shown(key)} is of the unknown type {kind}")
    start = scan.skip(form.size, shown(key))
    if kind == BOOL and scan.data[start] > 1:
        raise scan.fail(f"{shown(key)} is neither true nor false, but {scan.data[start]}")
    return form.unpack_from(scan.data, start)[0]


def _read_list(scan: _Scan, key: str) -> Any:
    kind, count = scan.u32(f"the type of {shown(key)}"), scan.u64(f"the length of {shown(key)}")
    if count > MAX_ITEMS:
        raise scan.fail(f"{shown(key)} has {count} items; at most {MAX_ITEMS} are read")
    if kind == STRING:
        return _read_texts(scan, count, shown(key))
    if kind == BOOL:
        start = scan.skip(count, shown(key))
        return [byte != 0 for byte in scan.data[start : start + count]]
    form = _ARRAY_TYPES.get(kind)
    if form is None:
        raise scan.fail(f"{shown(key)} is a list of the type {kind}, which is not read")
    start = scan.skip(count * form.itemsize, shown(key))
    return np.frombuffer(scan.data, form, count, start)


def _read_texts(scan: _Scan, count: int, what: str) -> list[str]:
    """A list of strings: vocabularies have hundreds of thousands, so this is one tight loop."""
    if count * 8 > scan.size - scan.at:
        raise scan.fail(f"{what} has {count} items, and the file ends after {scan.size - scan.at} bytes")
    data, size, at = scan.data, scan.size, scan.at
    unpack = _U64.unpack_from
    texts = []
    for _ in range(count):
        if at + 8 > size:
            raise scan.fail(f"{what} reaches beyond the end of the file")
        (length,) = unpack(data, at)
        at += 8
        if length > size - at:
            raise scan.fail(f"{what} has a string of {length} bytes at byte {at}, and the file ends at {size}")
        texts.append(data[at : at + length].decode("utf-8", "replace"))
        at += length
    scan.at = at
    return texts


def _alignment(scan: _Scan, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise scan.fail(f"general.alignment is {shown(value)}; must be a power of two up to {MAX_ALIGNMENT}")
    return value


def _read_tensors(scan: _Scan, count: int, alignment: int) -> dict[str, TensorEntry]:
    found: list[tuple[str, TensorType, tuple[int, ...], int]] = []
    for number in range(count):
        name = scan.text(MAX_NAME, f"the name of tensor {number}")
        found.append((name, *_read_entry(scan, shown(name))))
    base = -(-scan.at // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for name, kind, shape, offset in found:
        if name in entries:
            raise scan.fail(f"tensor {shown(name)} is there twice")
        if offset % alignment:
            raise scan.fail(f"tensor {shown(name)} begins at byte {offset} of the data, no multiple of {alignment}")
        size = prod(shape) // kind.values * kind.size
        if base + offset + size > scan.size:
            raise scan.fail(f"tensor {shown(name)} ends at byte {base + offset + size}, and the file at {scan.size}")
        entries[name] = TensorEntry(name, kind, shape, base + offset, size)
    _check_apart(scan, entries)
    return entries


def _read_entry(scan: _Scan, name: str) -> tuple[TensorType, tuple[int, ...], int]:
    sides = scan.u32(f"tensor {name}")
    if not 1 <= sides <= MAX_SIDES:
        raise scan.fail(f"tensor {name} has {sides} dimensions; 1 to {MAX_SIDES} are read")
    shape = tuple(scan.u64(f"tensor {name}") for _ in range(sides))
    if any(not 1 <= side <= MAX_SIDE for side in shape):
        raise scan.fail(f"tensor {name} has shape {shape}; sides are 1 to {MAX_SIDE}")
    number = scan.u32(f"tensor {name}")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise UnsupportedModel(f"{scan.path}: tensor {name} is of type {number}, which bridle does not know")
    if shape[0] % kind.values:
        raise scan.fail(f"tensor {name} has rows of {shape[0]}, no multiple of the {kind.values} of {kind.name}")
    return kind, shape[::-1], scan.u64(f"tensor {name}")


def _check_apart(scan: _Scan, entries: Mapping[str, TensorEntry]) -> None:
    """Refuse tensors that overlap."""
    end, before = 0, ""
    for entry in sorted(entries.values(), key=lambda entry: entry.start):
        if entry.start < end:
            raise scan.fail(f"tensors {shown(before)} and {shown(entry.name)} overlap")
        end, before = entry.start + entry.num_bytes, entry.name
