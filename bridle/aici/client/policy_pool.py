"""The control runtime of an operator's policies: a separate pool for the modules that policies name.

The policies' processes, workers and limits are separate from those of users' controllers, so users cannot use up the
resources of policies. Most servers have no policy with a Wasm module, so the runtime starts when the first request
needs it. The creator of the pool passes a function that creates the runtime.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from bridle.aici.client.pool import RuntimePool
from bridle.aici.client.reference import WasmController
from bridle.controllers.sync_pool import NoopPool
from bridle.engine.interfaces import DelegatingPool
from bridle.engine.request import Request
from bridle.errors import ControllerUnavailable
from bridle.threads import set_future_result

Prompt = tuple[int, ...]


class PolicyPool(DelegatingPool):
    """Runs the Wasm controllers of policies, in a runtime that the function `start` starts. If the start fails, the
    requests that wait for the runtime fail, and the next request tries again. `wake` is called from other threads."""

    def __init__(self, start: Callable[[], RuntimePool]) -> None:
        super().__init__(NoopPool())  # until the runtime is started
        self.answers_at_once = False
        self._start = start
        self._starters = ThreadPoolExecutor(1, thread_name_prefix="bridle-policies-start")
        self._lock = threading.Lock()
        self._is_closed = False
        self.runtime: RuntimePool | None = None
        self.wake: Callable[[], None] = lambda: None

    def accepts(self, controller: object) -> bool:
        """Return whether `controller` is a Wasm controller that a policy demands."""
        return isinstance(controller, WasmController) and controller.is_demanded

    def open(self, request: Request) -> Future[Prompt]:
        """Create an instance in the runtime, which is started if necessary."""
        if self.runtime is not None:
            return self.runtime.open(request)
        future: Future[Prompt] = Future()
        self._starters.submit(self._open, request, future)
        return future

    def _open(self, request: Request, future: Future[Prompt]) -> None:
        if future.cancelled():
            return
        try:
            runtime = self._started()
        except Exception as error:  # a bug must also be reported to the request, which waits
            self._conclude(future, ControllerUnavailable(f"the runtime of policies does not start: {error}"))
            return
        runtime.open(request).add_done_callback(lambda done: self._pass_on(request, runtime, done, future))

    def _started(self) -> RuntimePool:
        if self.runtime is None:
            runtime = self._start()
            runtime.wake = lambda: self.wake()
            with self._lock:
                if not self._is_closed:
                    self.runtime = self._pool = runtime
                    return runtime
            runtime.shutdown()
            raise ControllerUnavailable("the engine is closed")
        return self.runtime

    def _pass_on(self, request: Request, runtime: RuntimePool, done: Future[Prompt], future: Future[Prompt]) -> None:
        error = done.exception()
        if not self._conclude(future, done.result() if error is None else error):
            runtime.abandon(request)

    def _conclude(self, future: Future[Prompt], outcome: Prompt | BaseException) -> bool:
        """Complete the future. Returns False if the future was cancelled."""
        is_awaited = set_future_result(future, outcome)
        if is_awaited:
            self.wake()
        return is_awaited

    def shutdown(self) -> None:
        """End the runtime, or stop its start. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._starters.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown()
