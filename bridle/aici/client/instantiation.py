"""Instances of controllers that the runtime creates for requests, until sequences claim them.

Instances are created over the side channel, in parallel to the engine's steps. If a request ends before its instance is
created, the instance is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bridle.aici import protocol
from bridle.aici.client.instantiate_messages import InitialOutput, instantiation, module_of, prompt_of
from bridle.aici.client.process import RuntimeConfig
from bridle.aici.client.reference import WasmController
from bridle.aici.client.supervisor import RuntimeInstance, RuntimeSupervisor
from bridle.engine.request import Request
from bridle.threads import set_future_result


@dataclass(frozen=True, slots=True)
class Opened:
    """An instance that no sequence has claimed yet: its runtime, and the id of its module if known."""

    life: RuntimeInstance
    module: str | None


class Instances:
    """Creates instances in the runtime of `keeper`. `wake` is called, from any thread, when an instance is ready.

    `strays` are ended requests whose instances must still be dropped. `strays` is empty if the runtime has the command
    `Discard`.
    """

    def __init__(
        self, config: RuntimeConfig, keeper: RuntimeSupervisor, first_words: InitialOutput, wake: Callable[[], None]
    ) -> None:
        self._config = config
        self.keeper = keeper
        self._first_words = first_words
        self._wake = wake
        self.opened: dict[str, Opened] = {}  # by request id
        self.pending: set[Future[Any]] = set()  # calls on the side channel that make or drop instances
        self.strays: deque[Request] = deque()
        self.openers = ThreadPoolExecutor(2, thread_name_prefix="bridle-aici-open")

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Create an instance for the request. The future returns the prompt, which the controller may have
        rewritten."""
        future: Future[tuple[int, ...]] = Future()
        self.openers.submit(self._open, request, future)
        return future

    def _open(self, request: Request, future: Future[tuple[int, ...]]) -> None:
        if future.cancelled():
            return
        try:
            life = self.keeper.wait(self._config.start_timeout)
            message, data_type = instantiation(request, self._config.dialect)
            call = life.side.call(message, data_type)
        except Exception as error:  # a bug must also be reported to the request, which waits
            self._conclude(future, error)
            return
        self.pending.add(call)
        call.add_done_callback(lambda done: self._take_instance(request, life, future, done))

    def _take_instance(
        self, request: Request, life: RuntimeInstance, future: Future[tuple[int, ...]], done: Future[Any]
    ) -> None:
        """Process the runtime's reply to an instantiation. Called on the side channel's thread."""
        try:
            prompt = prompt_of(request, done.result())
            self._first_words.note_instance(request, done.result())
        except Exception as error:
            self._conclude(future, error)
        else:
            self.opened[request.id] = Opened(life, module_of(done.result()))
            if not self._conclude(future, prompt):
                self._discard(request, life)
        finally:
            self.pending.discard(done)

    def _conclude(self, future: Future[tuple[int, ...]], outcome: tuple[int, ...] | Exception) -> bool:
        """Complete the future that `open` returned. Returns False if the future was cancelled."""
        is_awaited = set_future_result(future, outcome)
        if is_awaited:
            self._wake()
        return is_awaited

    def modules_of(self, request: Request) -> tuple[tuple[str, str], ...]:
        """Return the requested name and the module of the request's instance."""
        opened, controller = self.opened.get(request.id), request.controller
        if opened is None or opened.module is None or not isinstance(controller, WasmController):
            return ()
        return ((controller.module, opened.module),)

    def abandon(self, request: Request) -> None:
        """Drop the instance of a request that will not run. Safe from any thread."""
        opened = self.opened.get(request.id)
        if opened is not None:
            self._discard(request, opened.life)

    def _discard(self, request: Request, life: RuntimeInstance) -> None:
        """Drop an unneeded instance. If the runtime lacks the command `Discard`, a new sequence number claims the
        instance and is then freed."""
        self._first_words.forget(request)
        if "discard" in life.process.extensions:
            self.opened.pop(request.id, None)
            call = life.side.call(protocol.Discard(req_id=request.id), dict)
            self.pending.add(call)
            call.add_done_callback(self.pending.discard)
        else:
            self.strays.append(request)
            self._wake()

    def close(self) -> None:
        """Create no more instances. Idempotent."""
        self.openers.shutdown(wait=True, cancel_futures=True)
