"""The fork server: a process without threads that forks workers and compilers on the supervisor's behalf.

The fork server is forked from the supervisor before the supervisor has threads, with the vocabulary and the sandbox in
memory. So a new worker starts in a few milliseconds and shares this data. The fork server never compiles, because a
process that has compiled must not be forked. The children of the fork server die with the fork server, which dies with
the supervisor. If the fork server dies, the supervisor starts a new program as the fork server, because a process with
threads cannot fork safely.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import msgspec

from bridle import os_sandbox
from bridle.aici.runtime import messages as m
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.loaded_module import GuestEnvironment
from bridle.aici.runtime.module_loader import Sandbox
from bridle.aici.runtime.own_memory import own_memory
from bridle.aici.runtime.parent_watch import fork_watched
from bridle.aici.runtime.ring import PeerGone, Port, receive_frame, send_frame
from bridle.errors import InternalError, ShardUnavailable

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
#: The lower bits of the id of a process's CPU clock (Linux's `CPUCLOCK_SCHED`). The bits above them are the complement
#: of the process id.
_CPU_CLOCK = 2
_WORKER, _COMPILER, _OUR_COMPILER = "worker", "compiler", "compiler of shipped controllers"
#: Maximum number of seconds to wait for a new fork server.
_REVIVAL = 30.0
#: Seconds for which a new fork server waits for requests before it reads the tokenizer, because a model is usually
#: being loaded.
_SETTLE_SECONDS = 5.0
#: Maximum number of deaths of fork servers within this many seconds; after that, no new one is started.
_MAX_DEATHS, _SHORT = 3, 10.0
#: The niceness of background compilations, which get only the processor time that other processes leave.
_NICE = 10


@dataclass(slots=True)
class Process:
    """A process that the supervisor can watch and end, through a process handle (pidfd) that stays correct if the
    process id is reused."""

    pid: int
    handle: int

    def kill(self) -> None:
        """End the process now. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def wait(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds for the end of the process. Returns whether the process has ended."""
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(int(timeout * 1000), 0)))

    def cpu_seconds(self) -> float:
        """Return the processor time in seconds that all threads of the process have used; 0 if the process has
        ended."""
        try:
            return time.clock_gettime(~self.pid << 3 | _CPU_CLOCK)
        except OSError:
            return 0.0

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class ForkServer:
    """The supervisor's connection to the fork server. Thread-safe. `arguments` are the runtime's arguments, for a fork
    server that replaces a dead one."""

    def __init__(self, sock: socket.socket, pid: int, arguments: Sequence[str] = ()) -> None:
        self._socket, self._pid = sock, pid
        self._arguments = list(arguments)
        self._changed = threading.Condition()
        self._deaths: list[float] = []
        self.handle = os.pidfd_open(pid)  # readable when the fork server has ended

    def worker(self, descriptors: list[int]) -> Process:
        """Fork a worker. `descriptors`: the worker's ring memory, doorbell, side socket and, optionally, storage
        socket."""
        return self._spawn(_WORKER, descriptors)

    def compiler(self, descriptors: list[int], *, is_ours: bool = False) -> Process:
        """Fork a compiler. `descriptors` are a module's file, a memory file for the code, and a socket for the result.
        `is_ours` means that the module comes with bridle."""
        return self._spawn(_OUR_COMPILER if is_ours else _COMPILER, descriptors)

    def _spawn(self, kind: str, descriptors: list[int]) -> Process:
        with self._changed:
            try:
                return self._request(kind, descriptors)
            except PeerGone:
                dead = self._pid
            if not self._changed.wait_for(lambda: self._pid != dead, _REVIVAL):
                raise ShardUnavailable(f"cannot fork a {kind}: the runtime is restarting its processes") from None
            return self._request(kind, descriptors)

    def _request(self, kind: str, descriptors: list[int]) -> Process:
        send_frame(self._socket, kind.encode(), descriptors)
        data, handles = receive_frame(self._socket, 1)
        if not handles:
            raise InternalError(f"cannot fork a {kind}: {data.decode(errors='replace')}")
        return Process(int(data), handles[0])

    def revive(self) -> None:
        """Start a new fork server after the old one died. The calling thread must live as long as the fork server.
        Raises `InternalError` if the new fork servers die again and again."""
        now = time.monotonic()
        self._deaths = [*(death for death in self._deaths if now - death < _SHORT), now]
        if len(self._deaths) > _MAX_DEATHS:
            raise InternalError(f"the fork server died {len(self._deaths)} times within {_SHORT:g} s")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "bridle.aici.runtime", *self._arguments, "--nursery", str(theirs.fileno())]
        with theirs:
            theirs.set_inheritable(True)
            pid = os.posix_spawn(sys.executable, command, os.environ)
        os.waitpid(self._pid, 0)
        with self._changed:
            os.close(self.handle)
            self._socket.close()
            self._socket, self._pid, self.handle = ours, pid, os.pidfd_open(pid)
            self._changed.notify_all()


def start(surroundings: GuestEnvironment, arguments: Sequence[str], readable: Path) -> ForkServer:
    """Start the fork server. The caller must not have any threads yet. Workers may read files in the folder
    `readable`."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            serve(theirs, surroundings, readable)
        finally:
            os._exit(0)
    theirs.close()
    return ForkServer(ours, pid, arguments)


def die_with_parent() -> None:
    """End this process when its parent ends, for any reason."""
    parent = os.getppid()
    _prctl = ctypes.CDLL(None, use_errno=True).prctl
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def serve(sock: socket.socket, surroundings: GuestEnvironment, readable: Path) -> None:
    """Run the main loop of the fork server until the supervisor has ended."""
    from bridle.aici.runtime import compiler, worker  # noqa: F401 -- imported here, so that no child has to import them

    os_sandbox.preload()
    os_sandbox.leave_namespaces()
    die_with_parent()
    signal.signal(signal.SIGCHLD, bury_children)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    sandbox = Sandbox(surroundings.limits)
    select.select([sock], [], [], _SETTLE_SECONDS)
    surroundings.vocabulary.prepare()  # once for all workers, which share its pages
    while True:
        try:
            kind, descriptors = receive_frame(sock, 8)
        except PeerGone:
            return
        try:
            pid, handle = fork_watched()
        except OSError as error:
            send_frame(sock, str(error).encode())
        else:
            if pid == 0:
                sock.close()
                run_child(kind.decode(), descriptors, surroundings, sandbox, readable)
            send_frame(sock, str(pid).encode(), [handle])
            os.close(handle)
        for descriptor in descriptors:
            os.close(descriptor)


def bury_children(_number: int, _frame: FrameType | None) -> None:
    """Reap ended child processes, and log each death that the sandbox caused."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            why = os_sandbox.explain_end(os.waitstatus_to_exitcode(ended[1]))
            if why is not None:
                _log.error("runtime process %d ended: %s", ended[0], why)


def run_child(
    kind: str, descriptors: list[int], surroundings: GuestEnvironment, sandbox: Sandbox, readable: Path
) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # copies of a worker are not waited for
        die_with_parent()
        if kind == _WORKER:
            with contextlib.suppress(OSError):
                own_memory()  # before the sandbox forbids opening it
            os_sandbox.enter(readable=[readable], may_fork=True)
            be_worker(descriptors, surroundings, sandbox)
        elif kind == _OUR_COMPILER:
            os.nice(_NICE)
            limits = surroundings.limits
            be_compiler(descriptors, replace(limits, max_compile_time=limits.max_shipped_compile_time))
        else:
            be_compiler(descriptors, surroundings.limits)
    except BaseException as error:
        _log.error("runtime %s %d failed: %r", kind, os.getpid(), error)
    finally:
        os._exit(1)


def be_worker(descriptors: list[int], surroundings: GuestEnvironment, sandbox: Sandbox) -> None:
    from bridle.aici.runtime.worker import Worker

    memory, bell, side, *storage = descriptors
    port = Port(memory, socket.socket(fileno=bell), is_worker=True)
    os.close(memory)
    remote = socket.socket(fileno=storage[0]) if storage else None
    Worker(surroundings, sandbox, port, socket.socket(fileno=side), remote).run()


class CompileResult(msgspec.Struct):
    """A compiler's result without the machine code, which is in the memory file."""

    error: str = ""
    facts: str = ""


def be_compiler(descriptors: list[int], limits: RuntimeLimits) -> None:
    """Compile one module, report the result, and end this process."""
    from bridle.aici.runtime import compiler

    source, target, report = descriptors
    outcome = CompileResult()
    compiler.cap_resources(limits)
    os_sandbox.enter()
    try:
        with open(source, "rb") as file:
            code, facts = compiler.compile_module(file.read(), limits)
        outcome.facts = msgspec.json.encode(facts).decode()
        with open(target, "wb", closefd=False) as file:
            file.write(code)
    except MemoryError:
        outcome.error = f"compiling needs more than {limits.max_compile_memory} bytes"
    except Exception as error:
        outcome.error = str(error)
    send_frame(socket.socket(fileno=report), m.encode(outcome))
    os._exit(0)
