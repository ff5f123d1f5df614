"""Runs tool calls on an event loop in a separate thread, so that no tool delays the engine's steps.

Only the handle reports the result of a call. A tool that fails, is late, returns too much or does not exist ends the
call with an error message, never with an exception in the caller. This module does not know engines or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from bridle.controller_tools.access import EVERYBODY, ToolPermission
from bridle.controller_tools.call import Call
from bridle.controller_tools.client import MAX_NAME_CHARS, OF_REQUESTS, ClientTool, is_name, new_call_id, notice_of
from bridle.controller_tools.limits import DEFAULT_LIMITS, ToolLimits
from bridle.controller_tools.offer import ToolOffer
from bridle.controller_tools.session import NOBODY, ToolCallContext, entry_of, listed, pack_arguments
from bridle.errors import InvalidRequest, ToolFailed
from bridle.safe_repr import short_repr

_log = logging.getLogger(__name__)

_MAX_ERROR_CHARS = 2_000
#: Seconds that the executor waits at its end for tools to be closed.
_PATIENCE = 5.0
#: Maximum number of calls waiting for a client's answers that are listed for the client at once.
_MAX_TOLD = 100

Arguments = dict[str, Any]
T = TypeVar("T")
#: Data of calls in the log: none, the tool and the outcome of each call, or also arguments and answers.
LogLevel = Literal["none", "calls", "content"]


class Tool(Protocol):
    """A tool that takes arguments and answers with a text. All its methods run on the executor's event loop, and must
    not block it."""

    @property
    def description(self) -> str:
        """Description of the tool, one sentence."""

    async def offers(self) -> list[ToolOffer]:
        """Return the tools that a model may call, with full names. Raises `ToolFailed`."""

    async def call(self, member: str, arguments: Arguments) -> str:
        """Return the answer. `member` is the part after the dot in a name such as `NAME.MEMBER`, else empty. Raises
        `ToolFailed` with the public part of a failure. The call is cancelled if no output waits for it any more."""

    async def close(self) -> None:
        """Release the tool's resources. Idempotent."""


class _Job(NamedTuple):
    """A running call of the tool `name`. `member` is the part of the tool that is called."""

    name: str
    member: str
    tool: Tool
    given: Arguments
    seconds: float
    call: Call


@dataclass(slots=True)
class ToolCounts:
    """Counters of one tool."""

    num_calls: int = 0
    num_failed: int = 0
    num_running: int = 0
    seconds: float = 0.0


class ToolExecutor:
    """Runs calls of the tools that it was given, by their names. Safe from any thread; `close` it when done. The
    executor's thread starts with the first call.

    `grants` say which users may use a restricted tool, and `log` which data of calls is logged. Users may call the
    tools in `direct` themselves, without a controller.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool] | None = None,
        limits: ToolLimits = DEFAULT_LIMITS,
        grants: Mapping[str, ToolPermission] | None = None,
        log: LogLevel = "none",
        direct: Collection[str] = (),
    ) -> None:
        self.limits = limits
        self._grants, self._log, self._direct = dict(grants or {}), log, frozenset(direct)
        self._tools = dict(tools or {})
        for name in self._tools:
            _check_name(name)
        self._lock = threading.Lock()
        self._listeners: set[Callable[[], None]] = set()
        self._of_requests = ClientTool("What requests name as tools of their clients.")
        self._counts = {name: ToolCounts() for name in self._tools}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: set[Call] = set()
        self._asked: dict[str, tuple[str, Call]] = {}  # calls that clients answer, by id, each with its user
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tools, in their order."""
        return tuple(self._tools)

    @property
    def of_clients(self) -> tuple[str, ...]:
        """Return the names of the tools that the client of a request answers."""
        return tuple(name for name, tool in self._tools.items() if isinstance(tool, ClientTool))

    def describe(self, name: str) -> str:
        """Return the description of a tool."""
        return self._tools[name].description

    def counts(self) -> dict[str, ToolCounts]:
        """Return the counters of each tool."""
        with self._lock:
            return {
                name: ToolCounts(c.num_calls, c.num_failed, c.num_running, c.seconds)
                for name, c in self._counts.items()
            }

    def names_for(self, user: str, is_admin: bool) -> tuple[str, ...]:
        """Return the names of the tools that a user may use."""
        return tuple(name for name in self._tools if self._grants.get(name, EVERYBODY).permits(user, is_admin))

    def direct_for(self, user: str, is_admin: bool) -> dict[str, Tool]:
        """Return the tools that a user may call without a controller."""
        return {
            name: tool
            for name in self.names_for(user, is_admin)
            if name in self._direct and not isinstance(tool := self._tools[name], ClientTool)
        }

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the tools' event loop. Raises `ToolFailed` after `close`."""
        with self._lock:
            if self._closed:
                work.close()
                raise ToolFailed("tools are shut down")
            return asyncio.run_coroutine_threadsafe(work, self._started())

    def watch(self, on_done: Callable[[], None]) -> None:
        """Call `on_done`, from any thread, whenever a call has ended."""
        self._listeners.add(on_done)

    def unwatch(self, on_done: Callable[[], None]) -> None:
        """Stop calling `on_done` when calls end."""
        self._listeners.discard(on_done)

    def begin(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        behalf: ToolCallContext = NOBODY,
    ) -> Call:
        """Begin a call for the user in `behalf`. Never blocks, and never raises."""
        call = Call.of(name)
        try:
            job = self._checked(call, name, arguments, timeout, behalf.client_tools)
            loop = self._admit(job)
            if isinstance(job.tool, ClientTool):
                call_id = behalf.call_id or new_call_id()
                self.take_answers(call_id, behalf.user, call)
                call.notice = notice_of(call_id, call.name, job.given)
        except ToolFailed as error:
            call.end(error=str(error))
            return call
        with contextlib.suppress(RuntimeError):  # closed a moment ago, which has ended the call
            loop.call_soon_threadsafe(self._start, job)
        return call

    def take_answers(self, call_id: str, user: str, call: Call) -> None:
        """Allow this user to answer the call with this id, until the call has ended."""
        self._asked[call_id] = user, call
        call.when_done(lambda: self._asked.pop(call_id, None) and None)

    def asked_of(self, user: str) -> list[tuple[str, str]]:
        """Return the ids and notices of calls that wait for this user's answer; only the oldest ones if there are
        many."""
        asked = {call: call_id for call_id, (owner, call) in list(self._asked.items()) if owner == user}
        notices = [(call_id, call.notice) for call, call_id in list(asked.items())[:_MAX_TOLD]]
        return [(call_id, notice[1].decode()) for call_id, notice in notices if notice is not None]

    def waits_for(self, call_id: str, user: str) -> bool:
        """Return whether this call of this user waits for an answer."""
        return call_id in self._asked and self._asked[call_id][0] == user

    def answer(self, call_id: str, user: str, text: str, error: str | None = None) -> None:
        """End a call that was reported to a client. Raises `InvalidRequest` if no such call of this user waits, or if
        the answer is too long."""
        owner, call = self._asked.get(call_id, (None, None))
        if call is None or owner != user:
            raise InvalidRequest(f"no tool call {short_repr(call_id)} waits for an answer from this user", "call_id")
        try:
            self._bounded(text)
        except ToolFailed as failure:
            raise InvalidRequest(f"result: {failure}", "result") from None
        if not call.end(text, None if error is None else error[:_MAX_ERROR_CHARS]):
            raise InvalidRequest(f"tool call {short_repr(call_id)} has ended already", "call_id")
        self._tell()

    def _find(self, name: str, client_tools: Collection[str]) -> tuple[str, str, Tool]:
        """Return the tool that a name means: the name for metrics, the called part (`NAME.PART`), and the tool."""
        entry = entry_of(name, self._tools)
        if entry is not None:
            return entry, name[len(entry) + 1 :], self._tools[entry]
        if isinstance(name, str) and name in client_tools:
            return OF_REQUESTS, "", self._of_requests
        raise ToolFailed(f"unknown tool; available tools: {listed((*self.names, *client_tools))}")

    def _checked(
        self,
        call: Call,
        name: str,
        arguments: Mapping[str, Any] | None,
        timeout: float | None,
        client_tools: Collection[str],
    ) -> _Job:
        """Validate a call and return it as a job, with a copy of the arguments. Raises `ToolFailed`."""
        limits = self.limits
        entry, member, tool = self._find(name, client_tools)
        packed = pack_arguments(arguments, timeout, limits)
        seconds = limits.timeout if timeout is None else timeout
        return _Job(entry, member, tool, msgspec.json.decode(packed), seconds, call)

    def _admit(self, job: _Job) -> asyncio.AbstractEventLoop:
        """Count one more call. Returns the event loop that runs the call. Raises `ToolFailed` if too many calls are
        running."""
        with self._lock:
            if self._closed:
                raise ToolFailed("tools are shut down")
            if len(self._live) >= self.limits.max_running:
                raise ToolFailed(
                    f"{len(self._live)} tool calls are running; at most {self.limits.max_running} may run (max_running)"
                )
            loop = self._started()
            self._live.add(job.call)
            counts = self._counts.setdefault(job.name, ToolCounts())
            counts.num_calls += 1
            counts.num_running += 1
            return loop

    def _started(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the tools, and start its thread if necessary. The caller must hold the lock."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="bridle-tools", daemon=True)
            self._thread.start()
        return self._loop

    # -- on the executor's thread ------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._wind_up())
        finally:
            loop.close()

    def _start(self, job: _Job) -> None:
        loop, began = asyncio.get_running_loop(), time.monotonic()
        task = loop.create_task(self._answer(job))
        self._tasks.add(task)

        def note(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._note_end(job, time.monotonic() - began)

        task.add_done_callback(note)

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the task has ended with it
                loop.call_soon_threadsafe(task.cancel)

        job.call.when_done(stop)

    async def _answer(self, job: _Job) -> None:
        """Run one call until it ends with an answer or an error."""
        answer, error = "", None
        try:
            async with asyncio.timeout(job.seconds):
                answer = self._bounded(await job.tool.call(job.member, job.given))
        except TimeoutError:
            error = f"the tool did not answer within {job.seconds:g} seconds"
        except asyncio.CancelledError:
            error = "was cancelled"
        except ToolFailed as failure:
            error = str(failure)[:_MAX_ERROR_CHARS]
        except Exception as bug:
            _log.exception("tool %s failed", job.name)
            error = f"failed: {type(bug).__name__}"
        job.call.end(answer, error)

    def _note_end(self, job: _Job, seconds: float) -> None:
        """Record that a call's task has ended, also if it was cancelled before it began."""
        counts, call = self._counts[job.name], job.call
        call.cancel()
        with self._lock:
            self._live.discard(call)
            counts.num_running -= 1
            counts.num_failed += call.error is not None
            counts.seconds += seconds
        self._write(job, seconds)
        self._tell()

    def _write(self, job: _Job, seconds: float) -> None:
        """Log a call that has ended, if the operator turned the logging of calls on."""
        if self._log == "none":
            return
        call = job.call
        outcome = "answered" if call.error is None else short_repr(" ".join(call.error.split()))
        _log.info("tool %s after %.3f s: %s", call.name, seconds, outcome)
        if self._log == "content":
            answer = short_repr(call.text) if call.error is None else "none"
            _log.info("tool %s got the arguments %s and answered %s", call.name, short_repr(job.given), answer)

    def _bounded(self, answer: str) -> str:
        limit = self.limits.max_result_bytes
        size = len(answer)
        if size <= limit:
            size = len(answer.encode(errors="surrogatepass"))
        if size > limit:
            raise ToolFailed(f"the answer has more than {limit} bytes (max_result_bytes)")
        return answer

    def _tell(self) -> None:
        for tell in tuple(self._listeners):
            tell()

    async def _wind_up(self) -> None:
        """End all running calls, and close the tools. A tool that does not close in time is cancelled, so that it
        leaves no process behind."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        closing: list[Coroutine[Any, Any, None]] = [tool.close() for tool in dict.fromkeys(self._tools.values())]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await asyncio.gather(*tasks, *closing, return_exceptions=True)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for each in left:
            each.cancel()
        if left:
            await asyncio.wait(left, timeout=_PATIENCE)

    def close(self) -> None:
        """Cancel all calls and close the tools. Idempotent."""
        with self._lock:
            self._closed, loop = True, self._loop
            live = list(self._live)
        for call in live:
            call.end(error="tools were shut down")
        if loop is not None and self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(loop.stop)
            self._thread.join(2 * _PATIENCE)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not is_name(name):
        raise InvalidRequest(
            f"tools has the name {short_repr(name)}; must have 1 to {MAX_NAME_CHARS} printable characters", "tools"
        )
