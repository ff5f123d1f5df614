"""Calls between host and guest through pre-bound functions of wasmtime's C API, which are several times cheaper than
calls through wasmtime's Python API. This module uses private names of wasmtime, so only tested versions work.

Numbers are passed in arrays of 16-byte cells. An exception of a host function is stored as `guest.failure` and becomes
a trap. An epoch callback checks the running guest every few ticks, so that a guest can be ended at any time or be
allowed to continue.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import wasmtime
from wasmtime import _ffi as ffi

from bridle.aici.runtime.module_metadata import WASMTIME_VERSION
from bridle.aici.runtime.wasm import LOOK_TICKS, HostFunction, check_span, running, with_backtrace
from bridle.errors import ControllerTrap

if not WASMTIME_VERSION.startswith("50."):
    raise ImportError(
        f"wasmtime: got {WASMTIME_VERSION}; controllers need 50.x. Run: pip install 'wasmtime>=50.0.1,<51'"
    )

_Cells = ctypes.POINTER(ctypes.c_int64)
_HOST_CALL = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, _Cells, ctypes.c_size_t)
_EPOCH_CALL = ctypes.CFUNCTYPE(
    ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint8)
)
_NO_FINALIZER = ctypes.cast(0, ctypes.CFUNCTYPE(None, ctypes.c_void_p))
_U32, _U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def _prototype(name: str, result: Any, *arguments: Any) -> Any:
    """Return a separate ctypes object for a C function, so that its argument types can be plain addresses."""
    return ctypes.CFUNCTYPE(result, *arguments)((name, ffi.dll))


_call = _prototype(
    "wasmtime_func_call_unchecked",
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)
_set_deadline = _prototype("wasmtime_context_set_epoch_deadline", None, ctypes.c_void_p, ctypes.c_uint64)
_data_size = _prototype("wasmtime_memory_data_size", ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
_data = _prototype("wasmtime_memory_data", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_set_callback = _prototype(
    "wasmtime_store_epoch_deadline_callback", None, ctypes.c_void_p, _EPOCH_CALL, ctypes.c_void_p, ctypes.c_void_p
)
_new_error = _prototype("wasmtime_error_new", ctypes.c_size_t, ctypes.c_char_p)
_new_trap = _prototype("wasmtime_trap_new", ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)


class Crossing:
    """Makes calls between host and guest."""

    def __init__(self) -> None:
        self._kept: list[Any] = []  # callbacks must live longer than every linker that uses them

    def define(self, linker: wasmtime.Linker, function: HostFunction) -> None:
        """Make a host function available to modules that are linked with `linker`."""
        callback = _HOST_CALL(_trampoline(function))
        self._kept.append(callback)
        params = [wasmtime.ValType.i64() if p == "I" else wasmtime.ValType.i32() for p in function.params]
        results = [wasmtime.ValType.i32()] if function.has_result else []
        kind = wasmtime.FuncType(params, results)
        module, name = function.module.encode(), function.name.encode()
        error = ffi.wasmtime_linker_define_func_unchecked(
            linker.ptr(),
            ctypes.create_string_buffer(module),
            len(module),
            ctypes.create_string_buffer(name),
            len(name),
            kind.ptr(),
            ctypes.cast(callback, ffi.wasmtime_func_unchecked_callback_t),
            None,
            _NO_FINALIZER,
        )
        if error:
            raise wasmtime.WasmtimeError._from_ptr(error)

    def bind(self, store: wasmtime.Store, function: wasmtime.Func, num_params: int) -> Callable[..., int]:
        """Return a callable that runs a guest's exported function on this thread; `running.guest` must be set. A trap
        raises `guest.failure` if it is set, otherwise `ControllerTrap` with a backtrace."""
        raw = function._func
        context = ctypes.cast(store._context(), ctypes.c_void_p).value
        cells = (ctypes.c_int64 * (2 * max(num_params, 1)))()
        where, count = ctypes.addressof(cells), max(num_params, 1)
        raw_address = ctypes.addressof(raw)
        trap = ctypes.c_void_p()
        trap_reference = ctypes.byref(trap)

        def call(*arguments: int, _keep: Any = (raw, store)) -> int:
            for index, value in enumerate(arguments):
                cells[2 * index] = value
            trap.value = None
            _set_deadline(context, LOOK_TICKS)
            error = _call(context, raw_address, where, count, trap_reference)
            if error or trap.value:
                _raise(error, trap.value)
            return cells[0] & _U32

        return call

    def arm(self, store: wasmtime.Store) -> None:
        """Make calls into a new Wasm store interruptible."""
        _set_callback(ctypes.cast(store.ptr(), ctypes.c_void_p), _on_epoch, None, None)


class GuestMemory:
    """A guest's linear memory. Every access is checked against the memory's present size; a bad pointer raises
    `GuestFault`. The Python view of the memory is created again whenever the memory has grown."""

    __slots__ = ("_context", "_memory", "_memory_address", "_size", "_view")

    def __init__(self, store: wasmtime.Store, memory: wasmtime.Memory) -> None:
        self._context = ctypes.cast(store._context(), ctypes.c_void_p).value
        self._memory = memory
        self._memory_address = ctypes.addressof(memory._memory)
        self._size = -1
        self._view = memoryview(b"")

    @property
    def size(self) -> int:
        return int(_data_size(self._context, self._memory_address))

    def view(self) -> memoryview:
        """Return a writable view of all current memory."""
        size = _data_size(self._context, self._memory_address)
        if size != self._size:
            base = _data(self._context, self._memory_address)
            array = (ctypes.c_ubyte * size).from_address(base) if size else bytearray()
            self._view = memoryview(array).cast("B")
            self._size = size
        return self._view

    def read(self, start: int, length: int) -> bytes:
        view = self.view()
        check_span(start, length, len(view))
        return bytes(view[start : start + length])

    def write(self, start: int, data: bytes | memoryview) -> None:
        view = self.view()
        check_span(start, len(data), len(view))
        view[start : start + len(data)] = data

    def read_u32(self, start: int) -> int:
        view = self.view()
        check_span(start, 4, len(view))
        return int.from_bytes(view[start : start + 4], "little")

    def write_u32(self, start: int, value: int) -> None:
        view = self.view()
        check_span(start, 4, len(view))
        view[start : start + 4] = (value & _U32).to_bytes(4, "little")


def _trampoline(function: HostFunction) -> Callable[..., int]:
    body = function.function
    masks = [(2 * index, _U64 if kind == "I" else _U32) for index, kind in enumerate(function.params)]

    def call(_env: int, _caller: int, cells: Any, _count: int) -> int:
        guest = running.guest
        try:
            result = body(guest, *[cells[place] & mask for place, mask in masks])
            if result is not None:
                cells[0] = result
            return 0
        except BaseException as error:  # no exception may pass through Wasm frames, so it is kept and raised later
            guest.failure = error
            return int(_new_trap(b"host", 4))

    return call


def _look(_context: int, _data: int, delta: Any, kind: Any) -> int:
    """Decide whether a guest that has run for a few ticks of the epoch clock may continue. wasmtime calls this
    function."""
    guest = running.guest
    try:
        reason = guest.stop_reason()
    except BaseException as error:
        reason = error
    if reason is None:
        delta[0] = LOOK_TICKS
        kind[0] = 0
        return 0
    guest.failure = reason
    return int(_new_error(b"interrupted"))


_on_epoch = _EPOCH_CALL(_look)


def _raise(error: int | None, trap: int | None) -> None:
    """Raise the exception for a call's error or trap, with the guest's backtrace in its text."""
    if trap:
        text = str(wasmtime.Trap._from_ptr(ctypes.cast(trap, ctypes.POINTER(ffi.wasm_trap_t))))
    else:
        text = str(wasmtime.WasmtimeError._from_ptr(ctypes.cast(error or 0, ctypes.POINTER(ffi.wasmtime_error_t))))
    failure = running.guest.failure
    if failure is None:
        raise ControllerTrap(text)
    raise with_backtrace(failure, text)
