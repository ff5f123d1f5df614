"""A thin layer over wasmtime: engine settings, host functions, calls into guests, and their interruption.

`wasm_calls` makes the calls between host and guest. This module does not depend on controllers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wasmtime
from wasmtime import _ffi as ffi

from bridle.aici.runtime.limits import RuntimeLimits
from bridle.errors import ControllerError, ControllerTrap

#: Seconds between two ticks of the epoch clock, and ticks between two checks of a running guest.
TICK = 0.002
LOOK_TICKS = 2


class GuestFault(ControllerTrap):
    """A guest broke a rule of the host interface, for example with a bad pointer or by exceeding a limit."""


class GuestFailed(ControllerTrap):
    """A guest reported its own failure with a message. No backtrace is added to the message."""


class GuestStopped(ControllerError):
    """A guest was ended from outside, because it was too late or is no longer needed."""


class _Running(threading.local):
    """The guest that this thread runs. The guest's `failure` keeps the exception of a host function, because exceptions
    cannot pass through Wasm frames. The guest's `stop_reason()` is called every few milliseconds."""

    guest: Any = None


running = _Running()


@dataclass(frozen=True, slots=True)
class HostFunction:
    """A function that guests may import. `params` has one letter for each parameter (`i`: i32, `I`: i64). The function
    gets the running guest, then the parameters as unsigned numbers."""

    module: str
    name: str
    params: str
    has_result: bool
    function: Callable[..., int | None]


def check_span(start: int, length: int, size: int) -> None:
    """Raise `GuestFault` unless the bytes lie inside a memory of `size` bytes."""
    if start + length > size:
        raise GuestFault(f"the pointer {start:#x} with {length} bytes is outside the memory of {size} bytes")


def with_backtrace(failure: BaseException, text: str) -> BaseException:
    """Add the guest's backtrace to a failure. `text` is wasmtime's message about the trap."""
    place = backtrace_of(text)
    if not place or not isinstance(failure, ControllerError) or isinstance(failure, GuestFailed):
        return failure
    return type(failure)(f"{failure}\n{place}")


def backtrace_of(text: str) -> str:
    """Return the guest's backtrace from wasmtime's message; empty if the message has none."""
    start = text.find("wasm backtrace")
    if start < 0:
        return ""
    end = text.find("Caused by", start)
    return text[start : end if end >= 0 else None].rstrip()


def make_config(limits: RuntimeLimits, *, reference_types: bool, parallel: bool) -> wasmtime.Config:
    """Return a configuration with the Wasm features that guests may use. As in the original runtime, threads, tail
    calls, memory64, relaxed SIMD and exceptions are off."""
    config = wasmtime.Config()
    config.wasm_threads = False
    config.wasm_tail_call = False
    config.wasm_multi_memory = False
    config.wasm_memory64 = False
    config.wasm_relaxed_simd = False
    config.wasm_exceptions = False
    config.wasm_gc = False
    if not reference_types:
        config.wasm_reference_types = False
        # components require async unless it is set off
        ffi.wasmtime_config_wasm_component_model_async_set(config.ptr(), False)
    config.epoch_interruption = True
    config.max_wasm_stack = limits.max_wasm_stack
    config.parallel_compilation = parallel
    return config


class Ticker:
    """The thread that advances the epoch clock of a Wasm engine. The thread runs only while guests run, and is stopped
    before a fork of the process."""

    def __init__(self, engine: wasmtime.Engine, on_tick: Callable[[], None]) -> None:
        self._engine = engine
        self._on_tick = on_tick
        self._wanted = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the clock's thread in this process."""
        self._ended = False
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the clock's thread and wait for its end, because the process is about to fork."""
        self._ended = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def awake(self) -> None:
        """Keep the clock's thread awake while a guest runs."""
        if not self._wanted.is_set():
            self._wanted.set()

    def _run(self) -> None:
        while not self._ended:
            self._wanted.wait()
            time.sleep(TICK)
            self._engine.increment_epoch()
            self._on_tick()

    def park(self) -> None:
        """Let the clock's thread sleep until `awake` is called. Called from `on_tick` when no guest has run for a
        while."""
        self._wanted.clear()
