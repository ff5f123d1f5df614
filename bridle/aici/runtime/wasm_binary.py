"""Reads and rewrites the bytes of Wasm modules, for operations that wasmtime's API does not offer.

A fork by copy needs access to every memory and every mutable global of an instance. If a Wasm module does not export
its state, `expose_state` adds exports with names that do not occur in the module. `may_change_tables` detects whether a
guest can change its tables while it runs, which a copy could not reproduce. The input must have been validated by
wasmtime before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bridle.errors import InvalidRequest

_IMPORT, _MEMORY, _GLOBAL, _EXPORT, _START, _CODE = 2, 5, 6, 7, 8, 10
_EXTERN_FUNCTION, _EXTERN_MEMORY, _EXTERN_GLOBAL = 0, 2, 3
_NUMBER_TYPES = b"\x7f\x7e\x7d\x7c"
#: Order of sections in a module: 12 (data count) comes before 10, 13 (tags) after 5.
_ORDER = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 13: 6, 6: 7, 7: 8, 8: 9, 9: 10, 12: 11, 10: 12, 11: 13}
#: Instructions of constant expressions: those with a LEB128 number, and those with a fixed number of bytes.
_CONST_LEB = (0x41, 0x42, 0x23, 0xD0, 0xD2)
_CONST_SIZES = {0x43: 4, 0x44: 8}
#: Matches table.init, elem.drop and table.copy, also in padded form. Other table instructions need reference types.
_TABLE_INSTRUCTION = re.compile(rb"\xfc(?:[\x0c-\x0e]|[\x8c-\x8e]\x80*\x00)")

MAX_GLOBALS = 10_000


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A module that exports all state needed for a copy. The names of the added exports begin with `prefix`.
    `is_copyable` is False if a mutable global is not a number, or if the tables may change."""

    wasm: bytes
    prefix: str
    num_globals: int
    has_start: bool
    is_copyable: bool


def is_component(wasm: bytes) -> bool:
    """Return whether these bytes are a component and not a core module."""
    return wasm[:4] == b"\0asm" and wasm[4:8] == b"\x0d\0\x01\0"


def expose_state(wasm: bytes) -> Rewritten:
    """Export memory 0 as `<prefix>m` and each mutable global as `<prefix>g<n>`. A start function becomes an export
    `<prefix>s`, because a copy must not run it again."""
    parts = list(sections(wasm))
    bodies = dict(parts)
    imported = _imported_globals(bodies.get(_IMPORT, b"\0"))
    types = _global_types(bodies.get(_GLOBAL, b"\0"))
    mutable = [(imported + i, kind) for i, (kind, is_mutable) in enumerate(types) if is_mutable]
    prefix = _unused_prefix(wasm)
    added = [_export(f"{prefix}g{i}", _EXTERN_GLOBAL, index) for i, (index, _) in enumerate(mutable)]
    if bodies.get(_MEMORY, b"\0")[:1] != b"\0":
        added.append(_export(f"{prefix}m", _EXTERN_MEMORY, 0))
    if _START in bodies:
        added.append(_export(f"{prefix}s", _EXTERN_FUNCTION, _leb(bodies[_START], 0)[0]))
    count, start = _leb(bodies.get(_EXPORT, b"\0"), 0)
    body = encode_leb(count + len(added)) + bodies.get(_EXPORT, b"\0")[start:] + b"".join(added)
    copyable = all(kind in _NUMBER_TYPES for _, kind in mutable) and not may_change_tables(wasm)
    return Rewritten(_with_exports(parts, body), prefix, len(mutable), _START in bodies, copyable)


def may_change_tables(wasm: bytes) -> bool:
    """Return whether the code may contain an instruction that changes a table. A result of True may be wrong; a result
    of False is certain. The module must be valid without reference types."""
    return any(kind == _CODE and _TABLE_INSTRUCTION.search(body) is not None for kind, body in sections(wasm))


# -- sections and their parts ------------------------------------------------------------------------------


def sections(wasm: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and body of each section, including custom sections."""
    position = 8
    while position < len(wasm):
        kind = wasm[position]
        size, start = _leb(wasm, position + 1)
        if start + size > len(wasm):
            raise InvalidRequest(f"section {kind} of the module has {size} bytes and ends after the module")
        yield kind, wasm[start : start + size]
        position = start + size


def _with_exports(kinds: list[tuple[int, bytes]], body: bytes) -> bytes:
    """Return the module's bytes with `body` as its export section."""
    parts = [b"\0asm\x01\0\0\0"]
    exports = bytes([_EXPORT]) + encode_leb(len(body)) + body
    done = False
    for kind, content in kinds:
        if not done and kind != 0 and _ORDER.get(kind, 99) >= _ORDER[_EXPORT]:
            parts.append(exports)
            done = True
        if kind not in (_EXPORT, _START):
            parts.append(bytes([kind]) + encode_leb(len(content)) + content)
    if not done:
        parts.append(exports)
    return b"".join(parts)


def _imported_globals(body: bytes) -> int:
    """Return the number of imported globals, which come first in the global indices. A module that imports globals will
    not link."""
    count, position = _leb(body, 0)
    found = 0
    for _ in range(count):
        for _ in range(2):
            length, position = _leb(body, position)
            position += length
        kind = body[position]
        position += 1
        if kind == 0:  # function: type index
            _, position = _leb(body, position)
        elif kind == 1:  # table: element type, limits
            position = _skip_limits(body, position + 1)
        elif kind == 2:
            position = _skip_limits(body, position)
        elif kind == 3:
            position += 2
            found += 1
        else:
            raise InvalidRequest(f"the module has an import of unknown kind {kind}")
    return found


def _skip_limits(body: bytes, position: int) -> int:
    flags = body[position]
    _, position = _leb(body, position + 1)
    if flags & 1:
        _, position = _leb(body, position)
    return position


def _global_types(body: bytes) -> list[tuple[int, bool]]:
    """Return value type and mutability of each global that the module defines."""
    count, position = _leb(body, 0)
    if count > MAX_GLOBALS:
        raise InvalidRequest(f"the module has {count} globals; at most {MAX_GLOBALS}")
    types = []
    for _ in range(count):
        types.append((body[position], body[position + 1] == 1))
        position = _skip_constant(body, position + 2)
    return types


def _skip_constant(body: bytes, position: int) -> int:
    """Return the position after the `end` instruction of a constant expression."""
    while (opcode := body[position]) != 0x0B:
        position += 1
        if opcode == 0xFD:  # v128.const
            _, position = _leb(body, position)
            position += 16
            continue
        if opcode in _CONST_LEB:
            while body[position] & 0x80:
                position += 1
            position += 1
        else:
            position += _CONST_SIZES.get(opcode, 0)
    return position + 1


def _unused_prefix(wasm: bytes) -> str:
    """Return a name that does not occur in the module."""
    number = 0
    while f"bridle:{number}:".encode() in wasm:
        number += 1
    return f"bridle:{number}:"


def _export(name: str, kind: int, index: int) -> bytes:
    text = name.encode()
    return encode_leb(len(text)) + text + bytes([kind]) + encode_leb(index)


def _leb(data: bytes, position: int) -> tuple[int, int]:
    """Return an unsigned LEB128 number and the position after it."""
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return result, position
        shift += 7


def encode_leb(value: int) -> bytes:
    parts = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        parts.append(low | (0x80 if value else 0))
        if not value:
            return bytes(parts)
