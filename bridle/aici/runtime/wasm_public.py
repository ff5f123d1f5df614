"""Crossing the border through wasmtime's documented Python API: slower, but with any version.

The API hands a host function's exception to whichever thread meets a trap next, so exceptions are kept on the guest
here too. It has no epoch callback: a guest is ended when its whole time is up, not earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wasmtime

from bridle.aici.runtime.wasm import TICK, GuestMemory, HostFunction, check_span, running, with_backtrace
from bridle.errors import ControllerTimeout, ControllerTrap

_U32, _U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


class PublicCrossing:
    """See `wasm.Crossing`."""

    def __init__(self) -> None:
        self._limit_ms = 10_000

    def define(self, linker: wasmtime.Linker, function: HostFunction) -> None:
        params = [wasmtime.ValType.i64() if p == "I" else wasmtime.ValType.i32() for p in function.params]
        results = [wasmtime.ValType.i32()] if function.has_result else []
        masks = [_U64 if p == "I" else _U32 for p in function.params]

        def call(*values: int) -> int | None:
            guest = running.guest
            try:
                result = function.function(guest, *[v & m for v, m in zip(values, masks, strict=True)])
            except BaseException as error:
                guest.failure = error
                raise
            return None if result is None else _signed(result)

        linker.define_func(function.module, function.name, wasmtime.FuncType(params, results), call)

    def bind(self, store: wasmtime.Store, function: wasmtime.Func, num_params: int) -> Callable[..., int]:
        ticks = max(int(self._limit_ms / 1000 / TICK), 2)

        def call(*arguments: int) -> int:
            store.set_epoch_deadline(ticks)
            try:
                result = function(store, *[_signed(value) for value in arguments])
            except Exception as error:
                raise self._explain(error) from None
            return (result or 0) & _U32

        return call

    def arm(self, store: wasmtime.Store, limit_ms: int) -> None:
        self._limit_ms = limit_ms
        store.set_epoch_deadline(max(int(limit_ms / 1000 / TICK), 2))

    def memory(self, store: wasmtime.Store, memory: wasmtime.Memory) -> GuestMemory:
        return PublicMemory(store, memory)

    def _explain(self, error: Exception) -> Exception:
        failure = running.guest.failure
        if failure is not None:
            told = with_backtrace(failure, str(error))
            return told if isinstance(told, Exception) else ControllerTrap(repr(failure))
        if isinstance(error, wasmtime.Trap) and error.trap_code is wasmtime.TrapCode.INTERRUPT:
            return ControllerTimeout(f"callback ran longer than {self._limit_ms} ms\n{error}")
        return ControllerTrap(str(error))


class PublicMemory:
    """See `wasm.GuestMemory`."""

    __slots__ = ("_memory", "_store")

    def __init__(self, store: wasmtime.Store, memory: wasmtime.Memory) -> None:
        self._store = store
        self._memory = memory

    @property
    def size(self) -> int:
        return self._memory.data_len(self._store)

    def view(self) -> memoryview:
        size = self.size
        if not size:
            return memoryview(bytearray())
        buffer: Any = self._memory.get_buffer_ptr(self._store, size)
        return memoryview(buffer).cast("B")

    def read(self, start: int, length: int) -> bytes:
        check_span(start, length, self.size)
        return bytes(self._memory.read(self._store, start, start + length))

    def write(self, start: int, data: bytes | memoryview) -> None:
        check_span(start, len(data), self.size)
        if data:
            self._memory.write(self._store, bytearray(data), start)

    def read_u32(self, start: int) -> int:
        return int.from_bytes(self.read(start, 4), "little")

    def write_u32(self, start: int, value: int) -> None:
        self.write(start, (value & _U32).to_bytes(4, "little"))


def _signed(value: int) -> int:
    value &= _U32
    return value - (1 << 32) if value >> 31 else value
