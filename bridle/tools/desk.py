"""Runs the calls of tools on an event loop in a thread of its own, so that no tool holds up the engine's steps.

What happens to a call is told by its handle alone: a tool that fails, is late, says too much or does not exist ends it
with an error in words, never with an exception in whoever made the call. Knows nothing of engines and of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from bridle.errors import InvalidRequest, ToolFailed
from bridle.shown import shown
from bridle.tools.access import EVERYBODY, Grant
from bridle.tools.call import Call
from bridle.tools.client import CALL_VARIABLE, MAX_NAME_CHARS, OF_REQUESTS, ClientTool, is_name
from bridle.tools.limits import DEFAULT_LIMITS, ToolLimits

_log = logging.getLogger(__name__)

_MAX_ERROR_CHARS = 2_000
_MAX_NAMED = 16
#: How long the desk waits at its end for tools that have to be closed, in seconds.
_PATIENCE = 5.0
#: How many calls a client is told of at once that wait for its answers.
_MAX_TOLD = 100

Arguments = dict[str, Any]
#: What the log has of calls: nothing, which tool and how it went, or also what was said.
LogLevel = Literal["none", "calls", "content"]


class Tool(Protocol):
    """Something that takes arguments and answers with a text. All its methods run on the desk's event loop, and must
    not block it."""

    @property
    def description(self) -> str:
        """What it is for, in a sentence."""
        raise NotImplementedError

    async def call(self, member: str, arguments: Arguments) -> str:
        """The answer. `member` is what follows the dot in a name such as `NAME.MEMBER`, else empty. Raises `ToolFailed`
        with what may be told of a failure. Cancelled when nobody waits for it any more."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give back what the tool holds. Idempotent."""


class _Job(NamedTuple):
    """A call as it is run: the tool `name`, and its part `member`."""

    name: str
    member: str
    tool: Tool
    given: Arguments
    seconds: float
    call: Call


@dataclass(slots=True)
class ToolCounts:
    """What was asked of one tool so far."""

    num_calls: int = 0
    num_failed: int = 0
    num_running: int = 0
    seconds: float = 0.0


class ToolDesk:
    """Tools by their names. Safe from any thread; `close` it when done. Its thread starts with the first call.

    `grants` say who may use a tool that is not for everybody, `log` what is logged of calls.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool] | None = None,
        limits: ToolLimits = DEFAULT_LIMITS,
        grants: Mapping[str, Grant] | None = None,
        log: LogLevel = "none",
    ) -> None:
        self.limits = limits
        self._grants, self._log = dict(grants or {}), log
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
        self._asked: dict[str, tuple[str, Call]] = {}  # calls that clients answer, and whose they are, by id
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """All tools, in their order."""
        return tuple(self._tools)

    def describe(self, name: str) -> str:
        """What a tool is for."""
        return self._tools[name].description

    def counts(self) -> dict[str, ToolCounts]:
        """What was asked of each tool so far."""
        with self._lock:
            return {
                name: ToolCounts(c.num_calls, c.num_failed, c.num_running, c.seconds)
                for name, c in self._counts.items()
            }

    def names_for(self, user: str, is_admin: bool) -> tuple[str, ...]:
        """The tools that a user may use."""
        return tuple(name for name in self._tools if self._grants.get(name, EVERYBODY).permits(user, is_admin))

    def watch(self, on_done: Callable[[], None]) -> None:
        """Have `on_done` called, from any thread, whenever a call has ended."""
        self._listeners.add(on_done)

    def unwatch(self, on_done: Callable[[], None]) -> None:
        """Have it called no longer."""
        self._listeners.discard(on_done)

    def begin(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        user: str = "",
        client_tools: Collection[str] = (),
    ) -> Call:
        """Begin a call on behalf of a user, whose client answers `client_tools`. Never blocks, and never raises."""
        call = Call(shown(name)[1:-1] if isinstance(name, str) else "?")
        try:
            job = self._checked(call, name, arguments, timeout, client_tools)
            loop = self._admit(job)
            if isinstance(job.tool, ClientTool):
                self._tell_client(job, user)
        except ToolFailed as error:
            call.end(error=str(error))
            return call
        with contextlib.suppress(RuntimeError):  # closed a moment ago, which has ended the call
            loop.call_soon_threadsafe(self._start, job)
        return call

    def _tell_client(self, job: _Job, user: str) -> None:
        """Give a call an id by which its client can answer it."""
        call_id, call = secrets.token_urlsafe(18), job.call
        self._asked[call_id] = user, call
        call.when_done(lambda: self._asked.pop(call_id, None) and None)
        call.notice = CALL_VARIABLE + call_id, msgspec.json.encode({"name": call.name, "arguments": job.given})

    def asked_of(self, user: str) -> list[tuple[str, str]]:
        """The calls that wait for an answer of this user's: their ids, and what their notices say. The oldest ones, if
        they are many."""
        asked = [(call_id, call) for call_id, (owner, call) in list(self._asked.items()) if owner == user]
        notices = [(call_id, call.notice) for call_id, call in asked[:_MAX_TOLD]]
        return [(call_id, notice[1].decode()) for call_id, notice in notices if notice is not None]

    def waits_for(self, call_id: str, user: str) -> bool:
        """Whether such a call of this user's waits for an answer."""
        return call_id in self._asked and self._asked[call_id][0] == user

    def answer(self, call_id: str, user: str, text: str, error: str | None = None) -> None:
        """End a call that a client was told of. Raises `InvalidRequest` if there is none of that user's, and for an
        answer that is too long."""
        owner, call = self._asked.get(call_id, (None, None))
        if call is None or owner != user:
            raise InvalidRequest(f"no call {shown(call_id)} waits for an answer of this user's", "call_id")
        try:
            self._bounded(text)
        except ToolFailed as failure:
            raise InvalidRequest(f"result: {failure}", "result") from None
        if not call.end(text, None if error is None else error[:_MAX_ERROR_CHARS]):
            raise InvalidRequest(f"call {shown(call_id)} is over", "call_id")
        self._tell()

    def _find(self, name: str, client_tools: Collection[str]) -> tuple[str, str, Tool]:
        """The tool that a name means: under which name it is counted, which part of it is meant, and itself."""
        entry = entry_of(name, self._tools)
        if entry is not None:
            return entry, name[len(entry) + 1 :], self._tools[entry]
        if isinstance(name, str) and name in client_tools:
            return OF_REQUESTS, "", self._of_requests
        raise ToolFailed(f"there is no such tool; there are {listed((*self.names, *client_tools))}")

    def _checked(
        self,
        call: Call,
        name: str,
        arguments: Mapping[str, Any] | None,
        timeout: float | None,
        client_tools: Collection[str],
    ) -> _Job:
        """What is to be called, with a copy of the arguments. Raises `ToolFailed`."""
        limits = self.limits
        entry, member, tool = self._find(name, client_tools)
        if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout <= limits.max_timeout):
            raise ToolFailed(
                f"timeout is {shown(timeout)}; must be more than 0 and at most {limits.max_timeout:g} seconds"
            )
        try:
            text = msgspec.json.encode(dict(arguments or {}))
        except Exception as error:  # whatever the objects of a caller may raise
            raise ToolFailed(f"its arguments are no JSON: {error}") from None
        if len(text) > limits.max_argument_bytes:
            raise ToolFailed(
                f"its arguments have {len(text)} bytes; at most {limits.max_argument_bytes} (max_argument_bytes)"
            )
        seconds = limits.timeout if timeout is None else timeout
        return _Job(entry, member, tool, msgspec.json.decode(text), seconds, call)

    def _admit(self, job: _Job) -> asyncio.AbstractEventLoop:
        """Count one more call; returns the loop that runs it. Raises `ToolFailed`."""
        with self._lock:
            if self._closed:
                raise ToolFailed("tools are shut down")
            if len(self._live) >= self.limits.max_running:
                raise ToolFailed(
                    f"{len(self._live)} calls are under way; at most {self.limits.max_running} (max_running)"
                )
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name="bridle-tools", daemon=True)
                self._thread.start()
            self._live.add(job.call)
            counts = self._counts.setdefault(job.name, ToolCounts())
            counts.num_calls += 1
            counts.num_running += 1
            return self._loop

    # -- the desk's thread -------------------------------------------------------------------------------

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
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the task with it
                loop.call_soon_threadsafe(task.cancel)

        job.call.when_done(stop)

    async def _answer(self, job: _Job) -> None:
        """Run one call to its end, whatever that is."""
        answer, error = "", None
        try:
            async with asyncio.timeout(job.seconds):
                answer = self._bounded(await job.tool.call(job.member, job.given))
        except TimeoutError:
            error = f"did not answer within {job.seconds:g} seconds"
        except asyncio.CancelledError:
            error = "was cancelled"
        except ToolFailed as failure:
            error = str(failure)[:_MAX_ERROR_CHARS]
        except Exception as bug:
            _log.exception("tool %s failed", job.name)
            error = f"failed: {type(bug).__name__}"
        job.call.end(answer, error)

    def _note_end(self, job: _Job, seconds: float) -> None:
        """Note that nothing of a call is left, also if it was cancelled before it began."""
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
        """Log a call that is over, as far as the operator wants it."""
        if self._log == "none":
            return
        call = job.call
        outcome = "answered" if call.error is None else shown(" ".join(call.error.split()))
        _log.info("tool %s after %.3f s: %s", call.name, seconds, outcome)
        if self._log == "content":
            answer = shown(call.text) if call.error is None else "none"
            _log.info("tool %s was given %s; its answer: %s", call.name, shown(job.given), answer)

    def _bounded(self, answer: str) -> str:
        limit = self.limits.max_result_bytes
        size = len(answer)
        if size <= limit:
            size = len(answer.encode(errors="surrogatepass"))
        if size > limit:
            raise ToolFailed(f"its answer has more than {limit} bytes (max_result_bytes)")
        return answer

    def _tell(self) -> None:
        for tell in tuple(self._listeners):
            tell()

    async def _wind_up(self) -> None:
        """End what is under way, and close the tools."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        closing: list[Coroutine[Any, Any, None]] = [tool.close() for tool in dict.fromkeys(self._tools.values())]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await asyncio.gather(*tasks, *closing, return_exceptions=True)

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


@dataclass(slots=True)
class Caller:
    """Calls tools on behalf of one request, all its outputs together. `names` are those of the desk that it may use
    (None: all), `client_tools` those that its client answers. One thread at a time."""

    desk: ToolDesk
    names: Collection[str] | None = None
    user: str = ""
    client_tools: Collection[str] = ()
    num_calls: int = 0
    pending: list[Call] = field(default_factory=list)

    def call(self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None) -> Call:
        """Begin a call; one that may not be made has failed at once."""
        limits = self.desk.limits
        self.pending = [call for call in self.pending if not call.is_done]
        why = None
        if self.names is not None and entry_of(name, self.names) is None and name not in self.client_tools:
            why = f"there is no such tool for this request; there are {listed((*self.names, *self.client_tools))}"
        elif len(self.pending) >= limits.max_pending:
            why = f"{len(self.pending)} calls of this request are under way; at most {limits.max_pending} (max_pending)"
        elif self.num_calls >= limits.max_calls:
            why = f"this request has made {self.num_calls} calls; at most {limits.max_calls} (max_calls)"
        if why is not None:
            call = Call(str(name)[:MAX_NAME_CHARS])
            call.end(error=why)
            return call
        self.num_calls += 1
        call = self.desk.begin(name, arguments, timeout, self.user, self.client_tools)
        self.pending.append(call)
        return call


def entry_of(name: Any, names: Collection[str]) -> str | None:
    """The one of `names` that a call's name means: itself, or what comes before a dot in it."""
    if not isinstance(name, str):
        return None
    if name in names:
        return name
    entry, dot, _ = name.partition(".")
    return entry if dot and entry in names else None


def adopt(calls: Collection[Call]) -> list[Call]:
    """The calls that a fork shares with the output that it comes from: those under way."""
    shared = [call for call in calls if not call.is_done]
    for call in shared:
        call.num_owners += 1
    return shared


def leave(calls: Collection[Call]) -> None:
    """Note that an output is over. What no other output waits for is cancelled."""
    for call in calls:
        call.num_owners -= 1
        if not call.num_owners:
            call.cancel()


def listed(names: Collection[str]) -> str:
    """The first of some names, for a message."""
    some = list(names)[:_MAX_NAMED]
    return ", ".join(some) + (f" and {len(names) - len(some)} more" if len(names) > len(some) else "") or "none"


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not is_name(name):
        raise InvalidRequest(
            f"tools has a name {shown(name)}; must be 1 to {MAX_NAME_CHARS} printable characters", "tools"
        )
