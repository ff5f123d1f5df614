"""An `EngineClient` for the engines of a Ray cluster. The routes of a front submit requests to this client.

Requests travel through a handle of Ray Serve, which chooses the engine. This process stores the tokens that a client
has received, so that another engine can continue exactly after them if an engine is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from itertools import count
from typing import Any

from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError

from bridle import errors
from bridle.config import EngineConfig
from bridle.controller_tools import ToolExecutor
from bridle.distributed import replica_messages as m
from bridle.distributed.codec.errors import unpack_error
from bridle.distributed.live_request import MAX_LOSSES, RoutedRequest
from bridle.distributed.tool_messages import ToolAnswered, ToolAsked, ToolGivenUp
from bridle.engine.client import EventStream
from bridle.engine.input_processor import InputProcessor
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import Request
from bridle.engine.statistics import EngineStatistics
from bridle.launch.ray.tools import FrontCalls
from bridle.outputs import Finished, FinishReason

_log = logging.getLogger(__name__)

#: Seconds between two heartbeats of engines, and seconds after which a heartbeat counts as missing.
_LOOK_SECONDS, _LOOK_TIMEOUT = 1.0, 3.0
_LOOKS_PER_GREETING = 10
#: Seconds before a request is sent again.
_PAUSE_SECONDS = 0.1


class ClusterClient:
    """The `EngineClient`, which must be used in the event loop that created it. `handle` is the handle of the engines'
    deployment. `tools` runs the tool calls of controllers; the caller must close it."""

    def __init__(self, handle: Any, hello: m.Handshake, tools: ToolExecutor) -> None:
        self._handle = handle
        self._calls = FrontCalls(tools, self._answer)
        self._learn(hello)
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, asyncio.Task[None]] = {}
        self._beats: list[m.Heartbeat] = []
        self._is_closed = False
        self.num_losses = 0
        self._looking = self._loop.create_task(self._look())

    @classmethod
    async def connect(cls, handle: Any, tools: ToolExecutor) -> ClusterClient:
        """Wait for the first engine, and return the client."""
        return cls(handle, await _greet(handle), tools)

    def _learn(self, hello: m.Handshake) -> None:
        """Store the description of the engines' model, which an update may have changed."""
        self._hello = hello
        self._intake = InputProcessor(
            hello.info, EngineConfig(max_forks=hello.max_forks, max_waiting=hello.max_waiting)
        )

    # -- EngineClient ----------------------------------------------------------------------------------------

    @property
    def info(self) -> ExecutorInfo:
        return self._hello.info

    @property
    def is_healthy(self) -> bool:
        """Return whether a healthy engine answered the last heartbeat."""
        return any(beat.is_healthy for beat in self._beats)

    @property
    def num_up(self) -> int:
        """Return the number of engines that answered the last heartbeat."""
        return len(self._beats)

    def submit(self, request: Request) -> EventStream:
        """Start a request on a suitable engine. The request waits if no engine is available."""
        if self._is_closed:
            raise errors.EngineClosed("this Ray Serve front is closed and accepts no requests")
        self._intake.check(request)
        m.pack_request(request)  # refuse a request that cannot be encoded
        if request.id in self._live:
            raise errors.InvalidRequest(f"id is {request.id!r}; another request with this id is running", "id")
        request = replace(request, parks=False)  # the next request may go to another engine
        live = RoutedRequest(request, EventStream(request.id, self.cancel))
        self._live[request.id] = self._loop.create_task(self._run(live))
        return live.stream

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Unknown ids are ignored."""
        self._loop.call_soon_threadsafe(self._cancel, request_id)

    def release_retained_kv(self, request_id: str) -> None:
        """Do nothing, because KV is not retained for requests on Ray."""

    def statistics(self) -> EngineStatistics:
        """Return the sums of the engines' statistics, from their last heartbeats."""
        total = EngineStatistics()
        for beat in self._beats:
            m.add_beat(total, beat)
        return total

    def close(self, drain: float = 0.0) -> None:
        """Refuse further requests, and cancel the running requests."""
        self._is_closed = True
        self._looking.cancel()
        for task in self._live.values():
            task.cancel()

    # -- in the event loop -----------------------------------------------------------------------------------

    def _cancel(self, request_id: str) -> None:
        task = self._live.get(request_id)
        if task is not None:
            task.cancel()

    async def _run(self, live: RoutedRequest) -> None:
        """Run one request from its first engine to its last event."""
        try:
            deadline = live.request.deadline
            async with asyncio.timeout(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                await self._see_through(live)
        except TimeoutError:
            live.end(FinishReason.DEADLINE, errors.DeadlineExceeded("the request's deadline passed"))
        except asyncio.CancelledError:
            live.end(FinishReason.CANCELLED)
        except errors.BridleError as error:
            live.end(FinishReason.ERROR, error)
        except Exception as error:
            _log.exception("request %s failed in the Ray Serve front", live.request.id)
            live.end(FinishReason.ERROR, errors.InternalError(f"the front failed: {error!r}"))
        finally:
            del self._live[live.request.id]
            self._calls.forget(live.request.id)

    async def _see_through(self, live: RoutedRequest) -> None:
        """Run a request until it has ended. If an engine is lost, the request continues on another engine. Raises the
        error that ends the request."""
        while (lost := await self._run_once(live)) is not None:
            self._note_loss(live, lost)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _run_once(self, live: RoutedRequest) -> str | None:
        """Run a request on one engine. Returns the reason if the engine was lost, and None if the request ended."""
        live.begin_again()
        response = self._handle.options(stream=True).generate.remote(_packed(live))
        try:
            async for data in response:
                if self._take(live, data):
                    return None
            return "its stream ended too soon"
        except (errors.BridleError, asyncio.CancelledError, TimeoutError):
            raise
        except BackPressureError as error:
            raise errors.Overloaded(str(error)) from None
        except RayTaskError as error:  # the engine runs: the request or bridle is at fault
            raise errors.InternalError(f"the engine of a request failed: {error}") from None
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            with contextlib.suppress(Exception):
                response.cancel()

    def _take(self, live: RoutedRequest, data: bytes) -> bool:
        """Send an engine's message to the client. Returns whether the message was the last one."""
        message = m.read_by_router(data)
        if isinstance(message, (ToolAsked, ToolGivenUp)):
            self._calls.handle(live.request, message)
            return False
        if isinstance(message, m.RequestFailed):
            raise _Gone(str(unpack_error(*message.error)))
        if not isinstance(message, m.Events):
            raise errors.ProtocolError(f"an engine sent {type(message).__name__} in a stream; expected events")
        fresh = [event for event in map(m.unpack_event, message.events) if live.is_news(event)]
        if not fresh:
            return False
        live.tell(fresh)
        return isinstance(fresh[-1], Finished) and fresh[-1].is_last

    def _note_loss(self, live: RoutedRequest, reason: str) -> None:
        self.num_losses += 1
        live.num_losses += 1
        _log.warning("request %s lost its engine: %s", live.request.id, reason)
        if live.num_losses >= MAX_LOSSES:
            raise errors.ShardUnavailable(f"the request lost {live.num_losses} engines; the last one because: {reason}")
        if (error := self._calls.begin_again(live.request.id)) is not None:
            raise error
        live.tell_resuming()

    async def _answer(self, address: str, message: ToolAnswered) -> None:
        """Send the answer of a tool call to the engine of the call."""
        await self._handle.answer.remote(m.encode(message), address)

    async def _look(self) -> None:
        """Request a heartbeat from all engines repeatedly, and sometimes the model's description from one engine."""
        for number in count(1):
            try:
                if number % _LOOKS_PER_GREETING == 0:
                    async with asyncio.timeout(_LOOK_TIMEOUT):
                        self._learn(await _greet(self._handle))
                response = self._handle.broadcast("look")
                found = await response.results_async(timeout_s=_LOOK_TIMEOUT, return_exceptions=True)
                messages = [m.read_by_router(data) for data in found if isinstance(data, bytes)]
                self._beats = [message for message in messages if isinstance(message, m.Heartbeat)]
            except Exception as error:  # after any error, no engine counts as available
                _log.debug("no engine answers the status query: %s", error)
                self._beats = []
            await asyncio.sleep(_LOOK_SECONDS)


async def _greet(handle: Any) -> m.Handshake:
    hello = m.read_by_router(await handle.hello.remote())
    if not isinstance(hello, m.Handshake):
        raise errors.ProtocolError(f"an engine sent {type(hello).__name__}; expected a handshake")
    return hello


class _Gone(Exception):
    """Raised when the engine of a request reports that it is closing."""


def _packed(live: RoutedRequest) -> bytes:
    """Encode the request in its current state, with the remaining seconds until its deadline."""
    request = live.remaining
    if request.deadline is not None:
        request = replace(request, deadline=request.deadline - time.monotonic())
    return m.encode(m.pack_request(request))
