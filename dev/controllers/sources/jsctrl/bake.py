"""Save a module in the state that it has after `aici_init`, so that no instance has to get there again.

The interpreter's start (its built-in objects, the library compiled and run) costs milliseconds and is the same for
every script. Here it runs once; then the data segments are replaced by what memory holds. Works for modules whose
state is memory alone: globals that changed, or a table that can, are refused.
"""

from __future__ import annotations

import re
from typing import Any

import wasmtime

from bridle.aici.runtime.wasm_binary import encode_leb, expose_state, sections
from bridle.errors import InvalidRequest

_MEMORY, _DATA, _DATA_COUNT = 5, 11, 12
_PAGE = 1 << 16
#: A run of bytes with at most so many zeros in it is one segment.
_RUN = re.compile(rb"[^\0](?:\0{0,16}[^\0])*")


def bake(wasm: bytes) -> bytes:
    """The same module, started. Raises `InvalidRequest` if its state is more than its memory."""
    exposed = expose_state(wasm)
    if not exposed.is_copyable:
        raise InvalidRequest("the module may change its tables, so its instances could not be copied")
    memory = _started(exposed.wasm, [f"{exposed.prefix}g{i}" for i in range(exposed.num_globals)])
    parts = [wasm[:8]]
    for kind, body in sections(wasm):
        if kind == _MEMORY:
            body = b"\x01\x00" + encode_leb(len(memory) // _PAGE)
        if kind not in (0, _DATA, _DATA_COUNT):
            parts.append(_section(kind, body))
    parts.append(_section(_DATA, _segments(memory)))
    return b"".join(parts)


def _started(wasm: bytes, global_names: list[str]) -> bytes:
    """All of memory after the start."""
    engine = wasmtime.Engine()
    store = wasmtime.Store(engine)
    module = wasmtime.Module(engine, wasm)
    linker = wasmtime.Linker(engine)
    linker.define_unknown_imports_as_traps(module)
    exports: Any = linker.instantiate(store, module).exports(store)
    before = [exports[name].value(store) for name in global_names]
    try:
        for name in ("_initialize", "aici_init"):
            exports[name](store)
    except (wasmtime.WasmtimeError, wasmtime.Trap) as error:
        raise InvalidRequest(f"the start fails where there is no host: {error}") from None
    if [exports[name].value(store) for name in global_names] != before:
        raise InvalidRequest("the start changes globals, which a saved module would not have")
    return bytes(exports["memory"].read(store))


def _segments(memory: bytes) -> bytes:
    """A data section that makes memory what it was."""
    runs = list(_RUN.finditer(memory))
    entries = [b"\0\x41" + _signed_leb(run.start()) + b"\x0b" + encode_leb(len(run[0])) + run[0] for run in runs]
    return encode_leb(len(entries)) + b"".join(entries)


def _section(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + encode_leb(len(body)) + body


def _signed_leb(value: int) -> bytes:
    parts = bytearray()
    while value >= 64:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
