"""The engine's `ControllerPool` over a control runtime: dialect 2, masks as bits in shared memory.

The main channel carries one exchange at a time. `ask` sends it, the callbacks run while the forward pass does, and
`collect` takes the reply. What is asked while an exchange is under way goes out with the next one. When the runtime
dies, the sequences it steered fail with a clear error, and a new runtime is started in the background; requests that
open meanwhile wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bridle.aici import protocol
from bridle.aici.client.exchange import Exchange, make_exchange
from bridle.aici.client.process import RuntimeConfig, RuntimeProcess
from bridle.aici.client.reference import WasmController
from bridle.aici.client.side import SideChannel
from bridle.engine.interfaces import Answer, Ask
from bridle.engine.request import Request
from bridle.errors import BridleError, ControllerError, ProtocolError

_log = logging.getLogger(__name__)

#: Pauses between attempts to start a runtime again, in seconds; the last one repeats.
_BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(slots=True)
class _Runtime:
    """One life of the runtime."""

    process: RuntimeProcess
    side: SideChannel
    exchange: Exchange


@dataclass(slots=True)
class _Queue:
    """What the next exchange will carry."""

    asks: list[Ask] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)


class RuntimePool:
    """Controllers in a runtime process. Start it once; it keeps a runtime alive until `shutdown`.

    `wake` is called from another thread when an opening is ready, so that an idle engine takes a step.
    """

    def __init__(self, config: RuntimeConfig, vocab_size: int, wake: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self.wake = wake
        self._vocab_size = vocab_size
        self._runtime: _Runtime | None = None
        self._ready = threading.Event()
        self._closed = False
        self._queue = _Queue()
        self._answers: dict[int, Answer] = {}
        self._live: set[int] = set()
        self._asked_at = 0.0
        self._patience = 0.0  # how long the engine is usually busy after asking, in seconds
        self.num_restarts = 0
        self._starter = ThreadPoolExecutor(2, thread_name_prefix="bridle-aici-start")
        self._start_now()

    # -- life of the runtime -----------------------------------------------------------------------------

    def _start_now(self) -> None:
        process = RuntimeProcess(self.config)
        exchange = make_exchange(process, self._vocab_size)
        self._runtime = _Runtime(process, SideChannel(process), exchange)
        self._ready.set()
        _log.info("control runtime started, pid %d, %d tokens", process.pid, process.vocab_size)

    def _restart(self) -> None:
        for attempt in range(1_000_000):
            time.sleep(_BACK_OFF[min(attempt, len(_BACK_OFF) - 1)])
            if self._closed:
                return
            try:
                self._start_now()
            except (BridleError, OSError) as error:
                _log.error("the control runtime does not start again: %s", error)
            else:
                return

    def _lose(self, error: str) -> None:
        """The runtime is gone: everything in it fails, and a new one is started."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        self._ready.clear()
        self.num_restarts += 1
        _log.error("the control runtime is lost: %s; %d sequences end", error, len(self._live))
        for seq_id in self._live | {ask.seq_id for ask in self._queue.asks}:
            self._answers[seq_id] = Answer(error=ControllerError(f"the control runtime ended: {error}"))
        self._live.clear()
        self._queue = _Queue()
        self._starter.submit(self._bury, runtime)

    def _bury(self, runtime: _Runtime) -> None:
        runtime.side.close()
        runtime.process.kill()
        if not self._closed:
            self._restart()

    @property
    def is_ready(self) -> bool:
        """Whether a runtime is up."""
        return self._ready.is_set()

    def call(self, request: protocol.Message, data_type: Any) -> Any:
        """A request on the side channel (upload, tags), waiting for a runtime if need be. Not for the engine's
        thread. Raises `InvalidRequest` or `ControllerError`."""
        return self._call(request, data_type).result()

    def _call(self, request: protocol.Message, data_type: Any) -> Future[Any]:
        if not self._ready.wait(self.config.start_timeout):
            raise ControllerError("the control runtime is not up")
        runtime = self._runtime
        if runtime is None:
            raise ControllerError("the control runtime was lost a moment ago; try again")
        return runtime.side.call(request, data_type)

    # -- ControllerPool ----------------------------------------------------------------------------------

    def accepts(self, controller: object) -> bool:
        """Whether it is a `WasmController`."""
        return isinstance(controller, WasmController)

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Make an instance; the controller may rewrite the prompt."""
        future: Future[tuple[int, ...]] = Future()
        self._starter.submit(self._open, request, future)
        return future

    def _open(self, request: Request, future: Future[tuple[int, ...]]) -> None:
        controller = request.controller
        if not isinstance(controller, WasmController) or not future.set_running_or_notify_cancel():
            return
        message = protocol.Instantiate(
            req_id=request.id,
            prompt=list(request.prompt),
            module_id=controller.module,
            module_arg=msgspec.Raw(msgspec.json.encode(controller.argument)),
            auth=msgspec.to_builtins(controller.auth),
        )
        try:
            result = self._call(message, protocol.SeqResult[protocol.PromptResult]).result()
            if result.result is None:
                raise ControllerError(_with_logs(result.error or "the controller did not start", result.logs))
            future.set_result(tuple(result.result.prompt))
        except BridleError as error:
            future.set_exception(error)
        self.wake()

    def abandon(self, request: Request) -> None:
        """Tell the runtime that the instance is not needed."""
        with contextlib.suppress(RuntimeError):  # shut down: the runtime is gone, and the instance with it
            self._starter.submit(self._discard, request.id)

    def _discard(self, request_id: str) -> None:
        with contextlib.suppress(BridleError):  # a lost runtime has no instances
            self.call(protocol.Discard(req_id=request_id), Any)

    def ask(self, asks: Sequence[Ask]) -> None:
        """Send the asks, or queue them if an exchange is under way."""
        self._queue.asks.extend(asks)
        self._live.update(ask.seq_id for ask in asks)
        self._queue.freed.extend(ask.seq_id for ask in asks if ask.final)
        self._asked_at = time.monotonic()
        self._flush()

    def close(self, seq_ids: Sequence[int]) -> None:
        """Free the instances; unknown ids are ignored."""
        gone = [seq_id for seq_id in seq_ids if seq_id in self._live]
        self._live.difference_update(gone)
        self._queue.freed.extend(seq_id for seq_id in gone if seq_id not in self._queue.freed)
        for seq_id in seq_ids:
            self._answers.pop(seq_id, None)
        self._flush()

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """Answers that are there; waits for those of `seq_ids` until `deadline` of the monotonic clock."""
        wanted = set(seq_ids)
        if wanted and self._asked_at:
            self._learn_patience()
        while self._runtime is not None and self._runtime.exchange.is_open:
            timeout = 0.0
            if wanted - self._answers.keys() and deadline is not None:
                timeout = max(deadline - time.monotonic(), 0.0)
            if not self._receive(timeout):
                break
        if self._runtime is not None and not self._runtime.process.is_alive():
            self._lose("its process ended")
        answers, self._answers = self._answers, {}
        return answers

    def shutdown(self) -> None:
        """End the runtime. Idempotent."""
        self._closed = True
        runtime, self._runtime = self._runtime, None
        self._ready.clear()
        if runtime is not None:
            runtime.side.close()
            runtime.process.kill()
        self._starter.shutdown(wait=True, cancel_futures=True)

    # -- exchanges ---------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Begin an exchange if there is something to say and the channel is free."""
        runtime, queue = self._runtime, self._queue
        if not (queue.asks or queue.freed):
            return
        if runtime is None:
            self._refuse(queue)
            return
        if runtime.exchange.is_open:
            return
        self._queue = _Queue()
        try:
            runtime.exchange.begin(queue.asks, queue.freed, self._patience)
        except ProtocolError as error:
            self._queue = queue
            self._lose(str(error))

    def _refuse(self, queue: _Queue) -> None:
        """No runtime: who asks now has lost its controller with the last one."""
        for ask in queue.asks:
            self._answers[ask.seq_id] = Answer(error=ControllerError("the control runtime is not up"))
            self._live.discard(ask.seq_id)
        self._queue = _Queue()

    def _receive(self, timeout: float) -> bool:
        """Take one reply, and begin the next exchange; False if none came in time."""
        if self._runtime is None:
            return False
        try:
            answers = self._runtime.exchange.receive(timeout)
        except ProtocolError as error:
            self._lose(str(error))
            return True
        if answers is None:
            return False
        for seq_id, answer in answers.items():
            if seq_id in self._live:
                self._answers[seq_id] = answer
            if answer.error is not None:
                self._live.discard(seq_id)
                self._queue.freed.append(seq_id)
        self._flush()
        return True

    def _learn_patience(self) -> None:
        """The engine comes back for answers after about one forward pass; controllers may take that long."""
        busy = time.monotonic() - self._asked_at
        self._asked_at = 0.0
        self._patience = busy if not self._patience else 0.8 * self._patience + 0.2 * busy


def _with_logs(error: str, logs: str) -> str:
    return f"{error}\n{logs}" if logs and logs not in error else error
