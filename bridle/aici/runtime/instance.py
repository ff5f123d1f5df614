"""One instance of a controller: its Wasm store, its memory, its data for host functions, and its copying.

Callbacks are called by name and return JSON as bytes, which `guest_protocol` interprets. A failed instance cannot be
called again, because its further behaviour is undefined.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import wasmtime

from bridle.aici.replies import WriteVar
from bridle.aici.runtime.loaded_module import GuestEnvironment, LoadedModule
from bridle.aici.runtime.logs import LogBuffer
from bridle.aici.runtime.storage import Variables
from bridle.aici.runtime.wasm import LOOK_TICKS, GuestFailed, GuestFault, running
from bridle.aici.runtime.wasm_calls import GuestMemory
from bridle.errors import ControllerError, ControllerTimeout, ControllerTrap, InvalidRequest

#: The result of `aici_host_self_seq_id` before an engine has given a number.
NO_SEQ_ID = 424242
_MAX_ERROR = 8 << 10
#: Seconds of CPU time that are left to a guest after it learned that it will be ended.
_MERCY = 0.02
#: Attributes of an instance that belong to its store.
_STORE = ("_exports", "_functions", "_store", "memory")


class NoMemory(GuestMemory):
    """Substitute for the guest's memory, until the instance has one."""

    size = 0

    def __init__(self) -> None:
        pass

    def view(self) -> memoryview:
        raise GuestFault("a host function was called before the instance exported its memory")


class Instance:
    """A running controller. Host functions read and write the instance's plain attributes. Only one thread at a time
    may use an instance, except for `cancel`."""

    def __init__(
        self, program: LoadedModule, surroundings: GuestEnvironment, argument: bytes, variables: Variables
    ) -> None:
        """Link the program and run its start function. Raises `ControllerError`, `InvalidRequest`."""
        self.program = program
        self.surroundings = surroundings
        self.dialect, self.layout = program.facts.dialect, program.facts.layout
        self.argument = argument
        self.variables = variables
        self.process_argument = b"{}"
        self.blobs: dict[int, bytes] = {}
        self.result: bytes | None = None
        self.log = LogBuffer(surroundings.limits.max_log)
        self.writes: list[WriteVar] = []
        self.masks: list[bytes] = []
        self.mask_options: dict[int, list[list[int]]] = {}
        self.constraints: dict[int, Any] = {}
        self.choices: dict[int, tuple[bytes, ...]] = {}
        self.next_constraint = 0
        self.seq_id = NO_SEQ_ID
        self.handle = 0
        self.failure: BaseException | None = None
        self.broken: str | None = None
        self.memory: GuestMemory = NoMemory()
        self._exports: Any = {}
        self.spent_tokenizing = self.num_commands = 0
        self.born_ns = time.monotonic_ns()
        self._cancelled: ControllerError | None = None
        self._budget_end = self._mercy_end = 0.0
        self._patience_end = math.inf
        self._listens = False  # whether the guest asked in this callback if its time is up
        self._functions: dict[str, Callable[..., int]] = {}
        self._open()
        if program.facts.has_start:
            self.run_guest(f"{program.facts.prefix}s", (), surroundings.limits.max_init_time)

    # -- calling -------------------------------------------------------------------------------------------

    def create(self, budget_ms: float) -> None:
        """Run the guest's `aici_init` and `aici_create` within `budget_ms` of CPU time."""
        self._begin()
        self.run_guest("aici_init", (), budget_ms)
        self.handle = self.run_guest("aici_create", (), budget_ms)

    def callback(self, name: str, argument: bytes, budget_ms: float) -> bytes:
        """Call an exported function of the guest, which can read `argument`. Returns the function's result as JSON
        text."""
        self._begin()
        self.process_argument = argument
        self.run_guest(name, (self.handle,), budget_ms)
        if self.result is None:
            raise self.broke(ControllerTrap(f"{name} did not call aici_host_return_process_result"))
        return self.result

    def main(self, prompt: list[int], budget_ms: float) -> None:
        """Show the prompt to the guest, then run its `aici_main`, or a C `main`, without a time limit."""
        self.callback("aici_init_prompt", msgspec.json.encode({"prompt": prompt}), budget_ms)
        name = "aici_main" if "aici_main" in self._exports else "main"
        if name not in self._exports:
            raise InvalidRequest("the module exports neither aici_main nor main")
        self.run_guest(name, (self.handle,) if name == "aici_main" else (0, 0), budget_ms)

    def cancel(self, reason: ControllerError) -> None:
        """End the running callback, and refuse further ones. May be called from any thread."""
        self._cancelled = reason

    def be_patient(self, milliseconds: float) -> None:
        """Limit the total CPU time of this thread's next callbacks, until they have given an answer."""
        self._patience_end = time.thread_time() + milliseconds / 1000

    def stop_reason(self) -> ControllerError | None:
        """Return the reason why the running callback must end now, or None. A guest that calls `is_time_up` gets some
        extra time to report its position."""
        reason = self._overdue()
        if reason is not None and self._listens:
            now = time.thread_time()
            self._mercy_end = self._mercy_end or now + _MERCY
            return reason if now > self._mercy_end else None
        return reason

    def is_time_up(self) -> bool:
        """Return whether the guest will soon be ended. Called when the guest asks whether its time is up."""
        self._listens = True
        return self._overdue() is not None

    def _overdue(self) -> ControllerError | None:
        """Return the reason why the running callback should not continue, or None. Only the callback's own processor
        time counts, because a busy machine is not the guest's fault."""
        if self._cancelled is not None:
            return self._cancelled
        used = time.thread_time()
        if used > self._patience_end:
            limit = self.surroundings.limits.max_timeout_steps
            return ControllerTimeout(
                f"timeout: the controller did not answer within the step limit for {limit} steps in a row (the limit)"
            )
        if used > self._budget_end:
            return ControllerTimeout(f"callback used more than its {self._budget_ms:g} ms of CPU time")
        return None

    def _last_word(self, error: ControllerError) -> ControllerError:
        """Return the error of a callback. If a guest ended itself because its time was up, the error text gives this
        reason, then the guest's message."""
        reason = self._overdue() if self._listens and isinstance(error, GuestFailed) else None
        return error if reason is None else type(reason)(f"{reason}\n{error}")

    def add_mask(self, bits: bytes) -> int:
        """Keep a mask that the running callback made. Returns the mask's name, which is its index plus 1."""
        limit = self.surroundings.limits.max_masks
        if len(self.masks) >= limit:
            raise GuestFault(f"the callback created more than {limit} masks, the limit")
        self.masks.append(bits)
        return len(self.masks)

    def broke(self, error: ControllerError) -> ControllerError:
        """Record that this instance failed. The memory that the instance used, if known, and the memory limit are added
        to the error text."""
        size, limit = self.memory.size, self.surroundings.limits.max_memory
        text = f"{error}\nmemory: {size} of at most {limit} bytes" if size else str(error)
        self.broken = text[:_MAX_ERROR]
        error.args = (self.broken,)
        return error

    # -- copying -------------------------------------------------------------------------------------------

    def fork(self, variables: Variables | None = None, spare: Instance | None = None) -> Instance:
        """Return a copy of the complete state. Call this only between callbacks, and only if the module's metadata says
        `is_copyable`. A `spare` instance of the same program is overwritten, so that its Wasm store is reused."""
        assert self.program.facts.is_copyable and self.broken is None
        if spare is not None and spare.memory.size > self.memory.size:  # a memory does not shrink
            spare.close()
            spare = None
        store = {} if spare is None else {name: spare.__dict__[name] for name in _STORE}
        other = object.__new__(Instance)
        other.__dict__.update(self.__dict__ | store)
        other.blobs = dict(self.blobs)
        other.log = LogBuffer(self.surroundings.limits.max_log)
        other.writes, other.masks, other.mask_options = [], [], {}
        other.choices = dict(self.choices)
        other.constraints = {handle: matcher.deep_copy() for handle, matcher in self.constraints.items()}
        other.variables = variables or self.variables
        other.failure = None
        if spare is None:
            other._open()
        other._copy_state(self)
        return other

    def become(self, branch: int) -> None:
        """Turn this object, in a forked child process, into branch `branch` of a fork. The branch starts without output
        and writes."""
        self.log.drain()
        self.writes = []

    def _copy_state(self, source: Instance) -> None:
        prefix = self.program.facts.prefix
        theirs, ours = source._exports, self._exports
        memory = ours.get(f"{prefix}m")
        if memory is not None:
            size = source.memory.size
            missing = (size - self.memory.size) >> 16
            if missing:
                memory.grow(self._store, missing)
            base = theirs[f"{prefix}m"].data_ptr(source._store)
            ctypes.memmove(memory.data_ptr(self._store), base, size)
        for index in range(self.program.facts.num_globals):
            name = f"{prefix}g{index}"
            ours[name].set_value(self._store, theirs[name].value(source._store))

    # -- helpers -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory now, before Python collects it. No callback may be running."""
        self._functions = {}
        self.memory = NoMemory()
        self.broken = self.broken or "the instance is closed"
        self._store.close()

    def _open(self) -> None:
        """Create a new Wasm store, and an instance of the program in it."""
        limits = self.surroundings.limits
        program = self.program
        store = wasmtime.Store(program.engine)
        store.set_limits(memory_size=limits.max_memory, table_elements=100_000, instances=1, tables=2, memories=1)
        program.crossing.arm(store)
        store.set_epoch_deadline(LOOK_TICKS)
        try:
            instance = program.pre.instantiate(store)
        except (wasmtime.WasmtimeError, wasmtime.Trap) as error:
            raise ControllerTrap(f"{error} (memory is limited to {limits.max_memory} bytes)") from None
        exports: Any = instance.exports(store)
        self._store, self._exports = store, exports
        memory = exports.get("memory")
        if isinstance(memory, wasmtime.Memory):
            self.memory = GuestMemory(store, memory)
        self._functions = {}

    def _begin(self) -> None:
        """Clear the values that are valid only during one callback."""
        self.result = None
        self.masks, self.mask_options = [], {}
        self.spent_tokenizing = self.num_commands = 0
        if self.broken is not None:
            raise ControllerTrap(f"Previous WASM Error: {self.broken}")

    def run_guest(self, name: str, arguments: tuple[int, ...], budget_ms: float) -> int:
        function = self._functions.get(name)
        if function is None:
            export = self._exports[name]
            function = self.program.crossing.bind(self._store, export, len(arguments))
            self._functions[name] = function
        self.failure = None
        self._start_budget(budget_ms)
        before, running.guest = running.guest, self
        try:
            return function(*arguments)
        except ControllerError as error:
            self._panic(error)
            raise self.broke(self._last_word(error)) from None
        except Exception as error:
            raise self.broke(ControllerError(f"internal error in a host function: {error!r}")) from error
        finally:
            running.guest = before

    def _start_budget(self, budget_ms: float) -> None:
        self._budget_ms = budget_ms
        self._budget_end = time.thread_time() + budget_ms / 1000
        self._listens, self._mercy_end = False, 0.0

    def _panic(self, error: ControllerError) -> None:
        """Call `aici_panic` after a fatal host error, so that the guest may print a last message."""
        if not isinstance(error, GuestFault):
            return
        self.log.write(f"FATAL ERROR: {str(error).splitlines()[0]}\n".encode())
        panic = self._exports.get("aici_panic")
        if panic is None:
            return
        self.failure = None
        self._budget_end = time.thread_time() + self.surroundings.limits.max_pre_step_time / 1000
        try:
            self.program.crossing.bind(self._store, panic, 0)()
        except Exception:
            self.failure = None  # the guest had its chance to report the error
