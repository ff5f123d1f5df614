"""The supervisor reads both channels, runs steps, and owns all state that outlives a request. The supervisor runs no
Wasm.

The main thread serves the main channel, one request at a time. The side channel has a reader thread and a few worker
threads. When the engine's process ends, this process ends too, with all processes that it started.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bridle.aici import protocol as p
from bridle.aici import replies as r
from bridle.aici.runtime.builtin_controllers import BuiltinControllers
from bridle.aici.runtime.compile_cache import Compilers
from bridle.aici.runtime.dialect1 import Dialect1Handler
from bridle.aici.runtime.dialect2 import Dialect2Handler
from bridle.aici.runtime.fork_server import ForkServer
from bridle.aici.runtime.forks import Forks
from bridle.aici.runtime.github import Downloads
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.modules import ModuleStore
from bridle.aici.runtime.parent_watch import ParentWatch
from bridle.aici.runtime.pool import WorkerPool
from bridle.aici.runtime.registry import Registry
from bridle.aici.runtime.side import SideOps, SideOptions
from bridle.aici.runtime.step_dispatcher import Steps
from bridle.aici.runtime.vocabulary import RuntimeVocabulary
from bridle.aici.runtime.worker_handle import WorkerHandle
from bridle.aici.shm_channel import Duplex, SharedChannels
from bridle.errors import BridleError, ControllerError, InvalidRequest, Overloaded, ProtocolError

_log = logging.getLogger(__name__)
_SIDE_THREADS = 16
#: Seconds to wait for the engine to read a reply before checking that the engine still runs.
_REPLY_TIMEOUT = 600.0
#: Seconds between two cleanups of instances that no request needs, while no step comes.
_TIDY_INTERVAL = 0.1


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """The settings of a runtime. `dialect` is the engine's protocol, if known: 1, 1b or 2. `prepared` are the names of
    bridle's own controllers to compile at the start."""

    dialect: str
    dtype: str
    capabilities: frozenset[str]
    folder: Path
    side: SideOptions
    allow_downloads: bool
    prepared: tuple[str, ...] = ()


class Supervisor:
    """Serves one engine until it stops or dies."""

    def __init__(
        self,
        options: RuntimeOptions,
        limits: RuntimeLimits,
        link: SharedChannels,
        lifeline: ParentWatch,
        nursery: ForkServer,
        vocabulary: RuntimeVocabulary,
    ) -> None:
        self._options, self._limits, self._link = options, limits, link
        self._engine_lives = lifeline.holds
        self._vocabulary = vocabulary
        self._dialect = options.dialect
        self._registry = Registry(limits)
        self._store = ModuleStore(options.folder, limits)
        self._pool = WorkerPool(nursery, limits, self._worker_died, self._orphaned)
        compilers = Compilers(nursery, self._store, limits)
        shipped = BuiltinControllers(self._store, compilers, limits)
        shipped.prepare_in_background(options.prepared)
        downloads = Downloads(self._store, limits, allowed=options.allow_downloads)
        self._side = SideOps(
            self._store, compilers, shipped, downloads, self._pool, self._registry, vocabulary, limits, options.side
        )
        self._steps = Steps(self._pool, self._registry.table, limits)
        self._forks = Forks(self._registry.table, self._pool)
        self._engine1: Dialect1Handler | None = None
        self._engine2: Dialect2Handler | None = None
        self._threads = ThreadPoolExecutor(_SIDE_THREADS, "side")
        self._num_side = 0
        self._side_lock = threading.Lock()
        self._reply_lock = threading.Lock()

    def run(self) -> None:
        """Serve until the engine has ended, then return. A `stop` request ends the process."""
        threading.Thread(target=self._listen_side, name="side-reader", daemon=True).start()
        try:
            while True:
                data = self._link.main.receive(timeout=_TIDY_INTERVAL, alive=self._engine_lives)
                if data is None:
                    self._tidy()
                    continue
                reply = self._answer(data, self._main_op)
                self._send(self._link.main, reply)
        except ProtocolError as error:
            self._goodbye(error)

    # -- main channel --------------------------------------------------------------------------------------

    def _main_op(self, request: p.Request) -> Any:
        with self._registry.lock:
            if isinstance(request, p.PostPreProcess):
                self._spoke("1")
                data: Any = self._get_engine1().post_pre_process(request)
            elif isinstance(request, p.MidProcess):
                if request.dialect == 1:
                    data = self._get_engine1().mid_process(request)
                else:
                    self._spoke("2")
                    data = self._get_engine2().mid_process(request)
            else:
                return self._any_op(request)
            self._after_step()
            return data

    def _any_op(self, request: p.Request) -> Any:
        """Answer the requests that both channels accept."""
        if isinstance(request, p.Ping):
            return r.Pong()
        if isinstance(request, p.Tokens):
            if self._dialect != "2":
                return r.TokensData(self._vocabulary.size)
            return r.TokensData(self._vocabulary.size, self._vocabulary.eos, list(p.EXTENSIONS))
        if isinstance(request, p.Stop):
            self.stop()
        return self._side_op(request)

    def _side_op(self, request: p.Request) -> Any:
        if isinstance(request, p.MkModule):
            return self._side.mk_module(request)
        if isinstance(request, p.SetTags):
            return self._side.set_tags(request)
        if isinstance(request, p.GetTags):
            return self._side.get_tags(request)
        if isinstance(request, p.GetModule):
            return self._side.get_module(request)
        if isinstance(request, p.Instantiate):
            return self._side.instantiate(request, self._dialect)
        if isinstance(request, p.Discard):
            return self._side.discard(request)
        raise ProtocolError("got an operation on the side channel that belongs on the main channel")

    def _spoke(self, dialect: str) -> None:
        """Record the engine's dialect, which the engine's first step shows."""
        if self._dialect[0] != dialect:
            self._dialect = dialect

    def _get_engine1(self) -> Dialect1Handler:
        if self._engine1 is None:
            table, size = self._registry.table, self._vocabulary.size
            self._engine1 = Dialect1Handler(table, self._steps, self._forks, self._limits, self._link.masks, size)
        return self._engine1

    def _get_engine2(self) -> Dialect2Handler:
        if self._engine2 is None:
            self._engine2 = Dialect2Handler(
                self._registry.table,
                self._steps,
                self._forks,
                self._limits,
                self._options.capabilities,
                self._link.masks,
                self._options.dtype,
                self._vocabulary.size,
            )
        return self._engine2

    def _after_step(self) -> None:
        doomed, self._registry.doomed = self._registry.doomed, []
        if doomed:
            self._steps.release(doomed, "the request was discarded")

    def _tidy(self) -> None:
        """Clean up while the main channel is idle."""
        with self._registry.lock:
            self._registry.expire()
            self._after_step()
            self._steps.end_stuck()

    # -- side channel --------------------------------------------------------------------------------------

    def _listen_side(self) -> None:
        try:
            while True:
                data = self._link.side.receive(timeout=60.0, alive=self._engine_lives)
                if data is not None:
                    self._take_side(data)
        except Exception as error:  # without this thread no call would ever be answered
            self._goodbye(error)

    def _take_side(self, data: bytes) -> None:
        limit = self._limits.max_pending_side
        with self._side_lock:
            is_full = self._num_side >= limit
            if not is_full:
                self._num_side += 1
        if is_full:
            error = r.ErrorReply(f"{limit} requests are pending on the side channel, the limit", True, p.rid_of(data))
            self._reply_side(p.encode(error))
        else:
            self._threads.submit(self._serve_side, data)

    def _serve_side(self, data: bytes) -> None:
        try:
            self._reply_side(self._answer(data, self._side_any))
        except Exception as error:  # otherwise the call would get no reply
            self._goodbye(error)
        finally:
            with self._side_lock:
                self._num_side -= 1

    def _side_any(self, request: p.Request) -> Any:
        if isinstance(request, (p.PostPreProcess, p.MidProcess)):
            raise ProtocolError("got a step operation on the side channel; it belongs on the main channel")
        return self._any_op(request)

    def _reply_side(self, reply: bytes) -> None:
        with self._reply_lock:
            self._send(self._link.side, reply)

    # -- both ----------------------------------------------------------------------------------------------

    def _answer(self, data: bytes, handle: Callable[[p.Request], Any]) -> bytes:
        """Return the reply to a request. Any error becomes an error reply."""
        try:
            request = p.decode_request(data)
        except ProtocolError as error:
            return p.encode(r.ErrorReply(str(error), False, p.rid_of(data)))
        except msgspec.DecodeError as error:
            return p.encode(r.JsonFailure(f"not JSON: {error}"))
        rid = p.rid_of(request)
        try:
            p.auth_of(request)  # a malformed one is refused for every operation
            return p.encode(r.Ok(handle(request), rid))
        except Overloaded as error:
            return p.encode(r.ErrorReply(str(error), True, rid, error.retry_after or msgspec.UNSET))
        except BridleError as error:
            is_user_error = isinstance(error, (InvalidRequest, ControllerError))
            return p.encode(r.ErrorReply(str(error), is_user_error, rid))
        except Exception as error:  # a bug of bridle: the engine gets an error, and the runtime continues
            trace = p.trace_of(request)
            _log.error("internal error: %r%s", error, f", traceparent {trace}" if trace else "")
            return p.encode(r.ErrorReply(f"internal error: {error!r}", False, rid))

    def _send(self, channel: Duplex, reply: bytes) -> None:
        if len(reply) > channel.max_message:
            text = f"reply of {len(reply)} bytes exceeds the channel's {channel.max_message}"
            reply = p.encode(r.ErrorReply(text, False, p.rid_of(reply)))
        channel.send(reply, _REPLY_TIMEOUT, self._engine_lives)

    def _goodbye(self, error: Exception) -> None:
        """End the runtime after the engine has ended, or after it broke the channel. If the engine has ended, remove
        the shared objects."""
        if self._engine_lives():
            _log.error("%s; the control runtime ends", error)
        else:  # no engine is left to be informed
            self._link.unlink()
        self.stop()

    def _worker_died(self, worker: WorkerHandle) -> None:
        for name, trace in self._registry.worker_died(worker).items():
            _log.warning("the worker process of request %s died, traceparent %s", name[:80], trace)

    def _orphaned(self, why: str) -> None:
        """End the runtime, because no worker can be started without a fork server. The engine then starts a new
        runtime."""
        self._goodbye(ProtocolError(why))

    def stop(self) -> None:
        """End this process and all processes that it started, now."""
        self._pool.close()
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGUSR1)
        os._exit(0)
