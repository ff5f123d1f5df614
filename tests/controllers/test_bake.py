"""Tests of saving a Wasm module in the state that it has after its initialization."""

from __future__ import annotations

from typing import Any

import pytest
import wasmtime
from hypothesis import assume, given
from hypothesis import strategies as st

from bridle.aici.runtime.wasm_binary import may_change_tables
from bridle.errors import InvalidRequest
from dev.controllers.sources.jsctrl.bake import bake

HEAD = """
  (import "env" "never" (func $never))
  (memory (export "memory") 1)
  (global $top (mut i32) (i32.const 4096))
  (data (i32.const 8) "before")
  (func (export "_initialize"))
"""


def module(start: str, more: str = "") -> bytes:
    return bytes(wasmtime.wat2wasm(f'(module {HEAD} {more} (func (export "aici_init") {start}))'))


def memory_of(wasm: bytes) -> bytes:
    """Return the memory of a new instance of the module before any of its functions run."""
    engine = wasmtime.Engine()
    store, linker = wasmtime.Store(engine), wasmtime.Linker(engine)
    compiled = wasmtime.Module(engine, wasm)
    linker.define_unknown_imports_as_traps(compiled)
    exports: Any = linker.instantiate(store, compiled).exports(store)
    return bytes(exports["memory"].read(store))


@given(st.dictionaries(st.integers(0, 65535), st.integers(1, 255), max_size=12))
def test_memory_is_as_the_start_left_it(writes: dict[int, int]) -> None:
    stores = "".join(f"(i32.store8 (i32.const {place}) (i32.const {byte}))" for place, byte in writes.items())
    expected = bytearray(65536)
    expected[8:14] = b"before"
    for place, byte in writes.items():
        expected[place] = byte
    plain = module(stores)
    assume(not may_change_tables(plain))  # numbers in the code may look like such instructions
    assert memory_of(bake(plain)) == expected


def test_memory_that_grew_is_large_from_the_beginning() -> None:
    start = "(drop (memory.grow (i32.const 2))) (i32.store8 (i32.const 196607) (i32.const 7))"
    memory = memory_of(bake(module(start)))
    assert len(memory) == 3 * 65536 and memory[-1] == 7


@pytest.mark.parametrize(
    ("start", "more", "error"),
    [
        ("(global.set $top (i32.const 1))", "", "changes globals"),
        ("(table.copy (i32.const 0) (i32.const 1) (i32.const 1))", "(table 2 funcref)", "may change its tables"),
    ],
)
def test_state_beyond_memory_is_refused(start: str, more: str, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        bake(module(start, more))


def test_a_start_that_asks_the_host_is_no_start() -> None:
    with pytest.raises(InvalidRequest, match="env::never"):
        bake(module("(call $never)"))
