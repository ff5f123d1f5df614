"""Child processes that test grammars. Processes start when needed, are reused, and are replaced when a grammar kills
them.

A child process tests whether a grammar compiles within the limits. The compiled grammar cannot be passed to the server,
so the server compiles it again. Any thread may call this module; a call blocks until the child process has answered.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from bridle import os_sandbox
from bridle.errors import InvalidRequest, Overloaded
from bridle.structured_output.limits import PARSER_LIMITS, ConstraintLimits

_PROGRAM = Path(__file__).with_name("compile_worker.py")
_KEPT_ENVIRONMENT = (os_sandbox.VARIABLE, "PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG")
#: Number of grammars after which a child process is replaced, so that its memory stays small.
_MAX_JOBS = 500
#: Seconds of wall-clock time that a grammar may take beyond its processor time, on a busy machine.
_PATIENCE = 10.0

NOT_USABLE = "the constraint's grammar is not usable: "


class GrammarRefused(InvalidRequest):
    """Raised for a grammar that llguidance refuses because of its content, not because of its cost."""


class CompileSandbox:
    """A pool of at most `limits.num_compilers` child processes. `try_grammar` returns a compiled grammar's memory in
    bytes."""

    def __init__(self, limits: ConstraintLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        self._running: set[_Child] = set()
        self._closed = False
        for _ in range(limits.num_compilers):
            self._idle.put(None)

    def try_grammar(self, grammar: str) -> int:
        """Return the approximate memory of the compiled grammar in bytes. Raises `InvalidRequest` with the problem of
        the grammar, or `Overloaded` if the machine was too busy for the test."""
        answer = self._ask(grammar)
        if "error" in answer:
            raise GrammarRefused(f"{NOT_USABLE}{answer['error']}", "constraint")
        return int(answer["bytes"])

    def refusal_of(self, grammar: str) -> tuple[str, float]:
        """Return llguidance's reason to refuse a grammar for its content ("" if it does not), and the processor seconds
        of the test. If compiling the grammar costs too much, this method raises the same errors as `try_grammar`."""
        answer = self._ask(grammar)
        return f"{NOT_USABLE}{answer['error']}" if "error" in answer else "", float(answer.get("seconds", 0.0))

    def _ask(self, grammar: str) -> dict[str, Any]:
        child = self._idle.get()
        kept: _Child | None = None
        try:
            child = child or self._start()
            answer = child.ask(grammar, self.limits)
            kept = child if child.is_fresh else None
        finally:
            if child is not None and kept is None:
                self._drop(child)
            self._idle.put(kept)
        return answer

    def _start(self) -> _Child:
        with self._lock:
            if self._closed:
                raise Overloaded("the constraint compiler is shut down")
            child = _Child()
            self._running.add(child)
            return child

    def _drop(self, child: _Child) -> None:
        child.kill()
        with self._lock:
            self._running.discard(child)

    def close(self) -> None:
        """End the child processes. Idempotent."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for child in running:
            child.kill()


class _Child:
    """One child process and the pipes to it."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment |= {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self._num_jobs = 0
        self._is_late = False
        self._process = subprocess.Popen(  # noqa: S603 - our own file, no shell
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C must not reach the child
        )

    @property
    def is_fresh(self) -> bool:
        return self._num_jobs < _MAX_JOBS

    def ask(self, grammar: str, limits: ConstraintLimits) -> dict[str, Any]:
        """Ask the child to test a grammar. Returns its answer. Raises `InvalidRequest` if the grammar killed the
        child."""
        self._num_jobs += 1
        job = {"grammar": grammar, "seconds": limits.seconds, "memory": limits.memory, "limits": PARSER_LIMITS}
        timer = threading.Timer(limits.seconds + _PATIENCE, self._give_up)
        timer.start()
        try:
            line = self._exchange(json.dumps(job).encode() + b"\n")
        finally:
            timer.cancel()
        if not line:
            raise self._cause_of_death(limits)
        answer = json.loads(line)
        return answer if isinstance(answer, dict) else {"error": "unknown error"}

    def _exchange(self, job: bytes) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(job)
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except OSError:
            return b""

    def _give_up(self) -> None:
        self._is_late = True
        self._process.kill()

    def _cause_of_death(self, limits: ConstraintLimits) -> InvalidRequest | Overloaded:
        code = self._process.wait()
        sandboxed = os_sandbox.explain_end(code)
        if sandboxed is not None:
            return InvalidRequest(f"the constraint's grammar cannot be compiled: {sandboxed}", "constraint")
        if self._is_late or code == -getattr(signal, "SIGKILL", 9):
            return Overloaded(f"the constraint's grammar was not compiled within {limits.seconds + _PATIENCE:g} s")
        if code == -getattr(signal, "SIGPROF", 0):
            why = f"it takes more than {limits.seconds:g} s of processor time"
        elif code == -signal.SIGSEGV:
            why = "it has too many parts, or parts within parts"
        else:
            why = f"it takes more than {limits.memory >> 20} MB of memory"
        return InvalidRequest(f"the constraint's grammar cannot be compiled: {why}", "constraint")

    def kill(self) -> None:
        """End the child process and close its pipes."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue
        self._process.wait()
