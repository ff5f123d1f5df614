"""Compiled code of modules: from the store, from the package, or made by a compiler process with limits.

Only the supervisor writes to the store. The supervisor stores only code that bridle's compiler made from the bytes with
the module's hash. Code that was compiled when the package was built is checked against the hash in the package's
manifest. So an upload can never become the compiled code of another module.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from bridle.aici.runtime import messages as m
from bridle.aici.runtime.fork_server import CompileResult, ForkServer, Process
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.module_metadata import settings_key
from bridle.aici.runtime.modules import Compiled, ModuleStore
from bridle.aici.runtime.ring import PeerGone, receive_frame
from bridle.controllers import standard
from bridle.errors import InvalidRequest, Overloaded, ShardUnavailable

_outcomes = m.decoder(CompileResult)

#: Factor by which a compiler without processor time may exceed the time limit.
_MAX_STRETCH = 6
#: Minimum number of seconds between two checks of the compiler's processor time.
_LEAST_WAIT = 0.001
#: Maximum number of seconds until the end of a compiler that closed its connection is known.
_EXIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """Machine code of a module, and the metadata that the compiler found."""

    code: bytes
    facts: str
    milliseconds: int


class Compilers:
    """Finds or makes compiled code. Thread-safe. A module is compiled once, even if several threads request it at the
    same time."""

    def __init__(self, nursery: ForkServer, store: ModuleStore, limits: RuntimeLimits) -> None:
        self._nursery = nursery
        self._store = store
        self._limits = limits
        self._settings = settings_key(limits)
        self._slots = threading.BoundedSemaphore(limits.max_compiles)
        self._lock = threading.Lock()
        self._known: dict[str, Compiled] = {}
        self._running: dict[str, Future[Compiled]] = {}
        self._unreadable: set[str] = set()

    def get(self, module: str) -> Compiled:
        """Return the compiled code of a stored module. Without stored code, the module is compiled first."""
        known = self._known.get(module)
        if known is not None and known.path.exists():
            return known
        return self._once(module, lambda: self._from_store(module))

    def compile(self, wasm: bytes) -> CompiledCode:
        """Compile bytes that are not stored yet. Raises `InvalidRequest` with the compiler's message."""
        if not self._slots.acquire(timeout=self._limits.max_compile_time / 1000):
            raise Overloaded(
                f"{self._limits.max_compiles} modules are being compiled, which is the limit; try again later"
            )
        try:
            return self._run(wasm)
        finally:
            self._slots.release()

    def compile_ours(self, wasm: bytes) -> CompiledCode:
        """Compile a controller that comes with bridle, without counting the compilation towards the users' limit."""
        return self._run(wasm, is_ours=True)

    def keep(self, module: str, code: CompiledCode) -> Compiled:
        """Store the result of `compile` for a module."""
        compiled = self._store.add_compiled(module, self._settings, code.code, code.facts)
        self._known[module] = compiled
        return compiled

    def reject(self, module: str) -> None:
        """Drop the code of a module that could not be loaded, so that it is compiled again."""
        self._unreadable.add(module)
        self._known.pop(module, None)
        self._store.forget_compiled(module, self._settings)

    def shipped(self, module: str, name: str) -> CompiledCode | None:
        """Return the package's machine code of bridle's own controller `name`. Returns None if the package has no code
        for this machine, or if loading the code failed before. Raises `ControllerUnavailable`."""
        if module in self._unreadable:
            return None
        found = standard.load_code(name, self._settings)
        return None if found is None else CompiledCode(*found, 0)

    def cached(self, module: str) -> Compiled | None:
        """Return stored compiled code; None if there is no such code. The first lookup reads the whole code, to verify
        its digest."""
        known = self._known.get(module)
        if known is None and (known := self._store.compiled(module, self._settings)) is not None:
            self._known[module] = known
        return known

    def _from_store(self, module: str) -> Compiled:
        compiled = self._store.compiled(module, self._settings)
        if compiled is None:
            return self.keep(module, self.compile(self._store.path(module).read_bytes()))
        self._known[module] = compiled
        return compiled

    def _once(self, module: str, make: Callable[[], Compiled]) -> Compiled:
        with self._lock:
            future = self._running.get(module)
            is_mine = future is None
            if future is None:
                future = self._running[module] = Future()
        if not is_mine:
            return future.result()
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                del self._running[module]
        return future.result()

    def _run(self, wasm: bytes, *, is_ours: bool = False) -> CompiledCode:
        begin = time.monotonic()
        source = os.memfd_create("bridle-wasm", os.MFD_CLOEXEC)
        target = os.memfd_create("bridle-code", os.MFD_CLOEXEC)
        report, theirs = socket.socketpair()
        try:
            with open(source, "wb", closefd=False) as file:
                file.write(wasm)
            os.lseek(source, 0, os.SEEK_SET)
            outcome = self._wait([source, target, theirs.fileno()], theirs, report, is_ours)
            if outcome.error:
                raise InvalidRequest(outcome.error, "binary")
            os.lseek(target, 0, os.SEEK_SET)
            with open(target, "rb", closefd=False) as file:
                code = file.read()
            return CompiledCode(code, outcome.facts, int(1000 * (time.monotonic() - begin)))
        finally:
            report.close()
            theirs.close()
            os.close(source)
            os.close(target)

    def _wait(
        self, descriptors: list[int], theirs: socket.socket, report: socket.socket, is_ours: bool
    ) -> CompileResult:
        limit = self._limits.max_shipped_compile_time if is_ours else self._limits.max_compile_time
        process = self._nursery.compiler(descriptors, is_ours=is_ours)
        theirs.close()
        try:
            await_word(report, process, limit)
            report.settimeout(limit / 1000)  # once begun, the report is sent at once
            data, _ = receive_frame(report)
            outcome: CompileResult = _outcomes.decode(data)
            return outcome
        except PeerGone as error:
            if not process.wait(_EXIT_SECONDS):
                raise ShardUnavailable(f"the compiler process closed its connection: {error}") from None
            raise InvalidRequest(
                f"the compiler died; compiling one module may take at most {self._limits.max_compile_memory} "
                "bytes of memory",
                "binary",
            ) from None
        finally:
            process.kill()
            process.close()


def await_word(
    report: socket.socket, process: Process, limit: int, clock: Callable[[], float] = time.monotonic
) -> None:
    """Wait until the compiler reports or ends. The time limit is `limit` milliseconds. This limit is extended if the
    compiler got less processor time, because the machine was busy. Raises `InvalidRequest`."""
    begin = clock()
    poll = select.poll()
    poll.register(report, select.POLLIN)
    left = limit / 1000
    while not poll.poll(1000 * max(left, _LEAST_WAIT)):
        left = limit / 1000 - process.cpu_seconds()
        if left <= 0 or clock() - begin > _MAX_STRETCH * limit / 1000:
            raise InvalidRequest(f"compiling the module took longer than the limit of {limit} ms", "binary")
