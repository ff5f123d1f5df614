"""Tests that components get no real time and no real randomness, for each WASI 0.2 version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import wasmtime

from bridle.aici.runtime.compiler import compile_module
from bridle.aici.runtime.component import ComponentInstance
from bridle.aici.runtime.limits import DEFAULT_LIMITS
from bridle.aici.runtime.loaded_module import GuestEnvironment
from bridle.aici.runtime.module_loader import Sandbox
from bridle.aici.runtime.storage import SharedVariables
from bridle.aici.runtime.wasi_components import EPOCH, TICK_NS
from bridle.aici.runtime.wasm import GuestFault
from tests.aici.instances import VOCABULARY

_PURE = {
    "clocks/monotonic-clock": {"now": "u64", "resolution": "u64"},
    "random/random": {"get-random-u64": "u64"},
    "random/insecure": {"get-insecure-random-u64": "u64"},
}


def looker(version: str, then: str = "") -> bytes:
    """Return a controller whose `next` prints the clocks and random numbers that it gets, in hexadecimal, and then does
    `then`."""
    imports, lowered, given, uses, calls = "", "", "", "", ""
    for number, (interface, functions) in enumerate(_PURE.items()):
        exports = "".join(f'(export "{name}" (func (result u64)))' for name in functions)
        imports += f'(import "wasi:{interface}@{version}" (instance $i{number} {exports}))'
        for name in functions:
            lowered += f'(core func ${name} (canon lower (func $i{number} "{name}")))'
            given += f'(export "{name}" (func ${name}))'
            uses += f'(import "host" "{name}" (func ${name} (result i64)))'
            calls += f"(call $hex (call ${name}))"
    text = f"""(component
      (import "wasi:io/poll@{version}" (instance $poll (export "pollable" (type (sub resource)))))
      (alias export $poll "pollable" (type $pollable))
      (import "wasi:clocks/wall-clock@{version}" (instance $wall
        (type $time' (record (field "seconds" u64) (field "nanoseconds" u32)))
        (export "datetime" (type $time (eq $time'))) (export "now" (func (result $time)))))
      (import "wasi:random/insecure-seed@{version}" (instance $seed
        (export "insecure-seed" (func (result (tuple u64 u64))))))
      {imports}
      (alias export $i0 "now" (func $unused))
      (core module $libcode (memory (export "memory") 1)
        (func (export "realloc") (param i32 i32 i32 i32) (result i32) (i32.const 4096)))
      (core instance $libc (instantiate $libcode))
      (core func $wall (canon lower (func $wall "now") (memory (core memory $libc "memory"))))
      (core func $seed (canon lower (func $seed "insecure-seed") (memory (core memory $libc "memory"))))
      {lowered}
      (core module $code (import "libc" "memory" (memory 1)) {uses}
        (import "host" "wall" (func $wall (param i32))) (import "host" "seed" (func $seed (param i32)))
        (global $end (mut i32) (i32.const 256))
        (func $hex (param $value i64) (local $i i32) (local $digit i32)
          (loop $more
            (local.set $digit (i32.wrap_i64 (i64.shr_u (local.get $value) (i64.const 60))))
            (local.set $value (i64.shl (local.get $value) (i64.const 4)))
            (i32.store8 (global.get $end) (i32.add (local.get $digit)
              (select (i32.const 48) (i32.const 87) (i32.lt_u (local.get $digit) (i32.const 10)))))
            (global.set $end (i32.add (global.get $end) (i32.const 1)))
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br_if $more (i32.lt_u (local.get $i) (i32.const 16)))))
        (func (export "create") (param i32 i32) (result i32) (i32.store8 (i32.const 32) (i32.const 0)) (i32.const 32))
        (func (export "next") (param i32 i32) (result i32)
          (global.set $end (i32.const 256))
          {calls}
          (call $wall (i32.const 64)) (call $hex (i64.load (i32.const 64)))
          (call $seed (i32.const 64)) (call $hex (i64.load (i32.const 64)))
          {then}
          (i32.store (i32.const 48) (i32.const 256))
          (i32.store (i32.const 52) (i32.sub (global.get $end) (i32.const 256)))
          (i32.const 48)))
      (core instance $it (instantiate $code (with "libc" (instance $libc)) (with "host" (instance
        (export "wall" (func $wall)) (export "seed" (func $seed)) {given}))))
      (func (export "create") (param "argument" string) (result (result (error string)))
        (canon lift (core func $it "create") (memory (core memory $libc "memory"))
          (realloc (core func $libc "realloc"))))
      (func (export "start") (param "prompt" string) (result string)
        (canon lift (core func $it "next") (memory (core memory $libc "memory")) (realloc (core func $libc "realloc"))))
      (func (export "next") (param "step" string) (result string)
        (canon lift (core func $it "next") (memory (core memory $libc "memory")) (realloc (core func $libc "realloc"))))
    )"""
    return bytes(wasmtime.wat2wasm(text))


def open_instance(wasm: bytes, folder: Path, resolution_ns: int = 0) -> ComponentInstance:
    limits = replace(DEFAULT_LIMITS)
    code, facts = compile_module(wasm, limits)
    (folder / "code").write_bytes(code)
    program = Sandbox(limits).load(str(folder / "code"), facts)
    surroundings = GuestEnvironment(VOCABULARY, limits, timer_resolution_ns=resolution_ns)
    instance = ComponentInstance(program, surroundings, b"", SharedVariables(limits))
    instance.create(5000)
    return instance


def seen(instance: ComponentInstance) -> list[int]:
    """Return the printed values: monotonic time, resolution, random, insecure random, wall clock seconds, and seed."""
    text = instance.callback("aici_mid_process", b"{}", 5000).decode()
    return [int(text[place : place + 16], 16) for place in range(0, len(text), 16)]


@pytest.mark.parametrize("version", ["0.2.0", "0.2.3", "0.2.12", "0.2.40"])
def test_time_is_a_count_and_chance_repeats(version: str, tmp_path: Path) -> None:
    wasm = looker(version)
    instance = open_instance(wasm, tmp_path)
    first, second = seen(instance), seen(instance)
    assert [first[0], second[0]] == [TICK_NS, 3 * TICK_NS]  # the wall clock was looked at in between
    assert first[1] == TICK_NS and first[4] == EPOCH
    assert len({*first[2:4], first[5], *second[2:4], second[5]}) == 6
    again = open_instance(wasm, tmp_path)
    assert [seen(again), seen(again)] == [first, second]


def test_forks_draw_other_numbers(tmp_path: Path) -> None:
    wasm = looker("0.2.0")
    results = []
    for branch in (0, 1, 2):
        instance = open_instance(wasm, tmp_path)
        seen(instance)
        if branch:  # what a process does after it was forked
            instance.become(branch)
        results.append(seen(instance))
    assert len({result[2] for result in results}) == 3
    assert {result[0] for result in results} == {3 * TICK_NS}


def test_an_operator_may_show_coarse_time(tmp_path: Path) -> None:
    instance = open_instance(looker("0.2.0"), tmp_path, resolution_ns=1_000)
    now, resolution, *_ = seen(instance)
    assert resolution == 1_000 and now % 1_000 == 0


def test_nobody_sleeps_and_random_bytes_are_bounded() -> None:
    from bridle.aici.runtime.wasi_components import INTERFACES, World

    for name in ("subscribe-instant", "subscribe-duration"):
        with pytest.raises(GuestFault, match="cannot sleep"):
            INTERFACES["clocks/monotonic-clock"][name](None, 10**12)
    with pytest.raises(GuestFault, match="at most 65536"):
        World(0).random_bytes(1 << 62)
