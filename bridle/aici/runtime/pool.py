"""A pool of worker processes, each leased to one tenant at a time.

A tenant's sequences are spread over its workers. An idle worker stays with its tenant until another tenant needs a
worker. The worker is then replaced by a new process, so that no process ever serves two tenants. With request isolation
(or for guests that can only be forked with their process) a worker belongs to one request alone.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from bridle.aici.runtime import messages as m
from bridle.aici.runtime.fork_server import ForkServer, Process
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.remote import serve
from bridle.aici.runtime.ring import PeerGone, Port, make_memory, receive_frame
from bridle.aici.runtime.storage import RequestState
from bridle.aici.runtime.worker_handle import WorkerHandle
from bridle.cgroups import num_cores
from bridle.errors import Overloaded, ShardUnavailable

_log = logging.getLogger(__name__)
_replies = m.decoder(m.Created | m.SplitDone)
#: Number of sequences per worker of a tenant above which another worker is started, if there is room.
_COMFORTABLE = 4
#: Maximum number of seconds that a signal takes to arrive.
_SIGNAL_TIME = 0.2


class WorkerPool:
    """Leases workers, notices their deaths, and reads their side sockets in a separate thread."""

    def __init__(
        self,
        nursery: ForkServer,
        limits: RuntimeLimits,
        on_death: Callable[[WorkerHandle], None],
        on_orphaned: Callable[[str], None],
    ) -> None:
        """Create an empty pool. `on_death` is called with a worker that died. `on_orphaned` is called with the reason
        when no further workers can be started."""
        self._nursery = nursery
        self._on_orphaned = on_orphaned
        self._limits = limits
        self._num_cores = num_cores()
        self._on_death = on_death
        self._room = threading.Condition()
        self.workers: list[WorkerHandle] = []
        self._rids = itertools.count(1)
        self._poll = select.epoll()
        self._sockets: dict[int, WorkerHandle] = {}
        self._poll.register(nursery.handle, select.EPOLLIN)
        threading.Thread(target=self._listen, name="workers", daemon=True).start()

    def new_rid(self) -> int:
        return next(self._rids)

    # -- leasing -------------------------------------------------------------------------------------------

    def lease(self, request: RequestState, key: int, *, alone: bool) -> WorkerHandle:
        """Return a worker for an instance. If all workers are busy, waits up to `max_queue_time`, then raises
        `Overloaded`."""
        end = time.monotonic() + self._limits.max_queue_time / 1000
        with self._room:
            while True:
                worker = self._find(request, alone)
                if worker is not None:
                    worker.keys.add(key)
                    return worker
                left = end - time.monotonic()
                if left <= 0:
                    raise Overloaded(f"{self._full(alone)}; waited {self._limits.max_queue_time} ms")
                self._room.wait(left)

    def release(self, worker: WorkerHandle, key: int) -> None:
        """Record that a worker's instance was dropped. A worker that belongs to one request ends with its last
        instance."""
        with self._room:
            worker.keys.discard(key)
            if worker.keys:
                return
            if worker.owner is not None and worker in self.workers:  # otherwise the worker died before
                self._remove(worker)
            self._room.notify_all()

    def bury(self, worker: WorkerHandle) -> None:
        """Remove a worker that died or must be killed. The worker's instances are lost."""
        with self._room:
            if worker not in self.workers:
                return
            self._remove(worker)
            self._room.notify_all()
        for future in list(worker.calls.values()):
            if not future.done():
                future.set_exception(ShardUnavailable("Worker: the process died"))
        worker.calls.clear()
        self._on_death(worker)

    def close(self) -> None:
        with self._room:
            for worker in list(self.workers):
                self._remove(worker)

    def _find(self, request: RequestState, alone: bool) -> WorkerHandle | None:
        mine = [w for w in self.workers if w.tenant == request.tenant and w.owner is None and not w.is_dead]
        if not alone and mine:
            best = min(mine, key=lambda worker: len(worker.keys))
            if len(best.keys) < _COMFORTABLE or len(mine) >= min(self._num_cores, self._limits.max_workers):
                return best
            return self._start(request, alone) or best
        return self._start(request, alone)

    def _start(self, request: RequestState, alone: bool) -> WorkerHandle | None:
        """Start a worker process. If necessary, the new process replaces an idle worker of another tenant."""
        if self._full(alone):
            warm = [w for w in self.workers if not w.keys and not w.calls and (w.owner is not None) == alone]
            if not warm:
                return None
            self._remove(warm[0])
        return self._spawn(request, alone)

    def _full(self, alone: bool) -> str | None:
        """Return the reason why no further worker can be started, or None."""
        count = sum((worker.owner is not None) == alone for worker in self.workers)
        limit = self._limits.max_processes if alone else self._limits.max_workers
        return f"all {limit} {'processes' if alone else 'workers'} are busy" if count >= limit else None

    def _spawn(self, request: RequestState, alone: bool) -> WorkerHandle:
        ends = _Ends(alone)
        process = self._nursery.worker(ends.theirs)
        return self._register(ends, process, request, alone)

    def _register(self, ends: _Ends, process: Process, request: RequestState, alone: bool) -> WorkerHandle:
        worker = WorkerHandle(process, ends.port, ends.side, request.tenant)
        worker.owner = request if alone else None
        worker.storage = ends.storage
        ends.close_theirs()
        self.workers.append(worker)
        for sock in (worker.side, worker.storage):
            if sock is not None:
                self._sockets[sock.fileno()] = worker
                self._poll.register(sock.fileno(), select.EPOLLIN)
        return worker

    def _remove(self, worker: WorkerHandle) -> None:
        self.workers.remove(worker)
        for sock in (worker.side, worker.storage):
            if sock is not None and self._sockets.pop(sock.fileno(), None) is not None:
                self._poll.unregister(sock.fileno())
        worker.close()

    # -- forking a process ---------------------------------------------------------------------------------

    def split(self, worker: WorkerHandle, key: int, new_key: int, branch: int, timeout: float) -> WorkerHandle:
        """Fork the worker process of a sequence for a new sequence. Raises `ShardUnavailable`, `Overloaded`."""
        assert worker.owner is not None
        with self._room:
            full = self._full(True)
            if full:
                raise Overloaded(full)
        ends = _Ends(True)
        rid = self.new_rid()
        future = worker.call(rid, m.ForkWorker(rid, key, new_key, branch), ends.theirs)
        try:
            done, handles = future.result(timeout)
        except TimeoutError:
            raise ShardUnavailable(f"the worker process did not fork within {timeout} s") from None
        finally:
            ends.close_theirs()
        if done.error or not handles:
            raise ShardUnavailable(done.error or "Worker: the process did not fork")
        with self._room:
            made = self._register(ends, Process(done.pid, handles[0]), worker.owner, True)
            made.keys.add(new_key)
        return made

    # -- listening -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._nursery.handle:
                    if not self._outlive_nursery():
                        return
                    break
                worker = self._sockets.get(descriptor)
                if worker is None:
                    continue
                try:
                    self._hear(worker, descriptor)
                except PeerGone:
                    self.bury(worker)
                except Exception as error:  # invalid data of one worker must not stop the others
                    _log.error("a worker process sent invalid data and is being ended: %r", error)
                    self.bury(worker)

    def _outlive_nursery(self) -> bool:
        """Start a new fork server after the old one died with all workers. Returns False if the start fails."""
        time.sleep(_SIGNAL_TIME)  # a signal to the whole process group may be ending this process too
        self._poll.unregister(self._nursery.handle)
        lost = list(self.workers)
        try:
            self._nursery.revive()  # first, because other threads wait for it
        except Exception as error:
            self._on_orphaned(str(error))
            return False
        for worker in lost:
            self.bury(worker)
        self._poll.register(self._nursery.handle, select.EPOLLIN)
        return True

    def _hear(self, worker: WorkerHandle, descriptor: int) -> None:
        if worker.storage is not None and descriptor == worker.storage.fileno():
            assert worker.owner is not None
            serve(worker.storage, worker.owner.variables)
            return
        data, handles = receive_frame(worker.side, 1)
        reply = _replies.decode(data)
        future = worker.calls.pop(reply.rid, None)
        if future is not None and not future.done():
            future.set_result((reply, handles))
            return
        for handle in handles:
            os.close(handle)


class _Ends:
    """Both ends of the connections of a worker that is about to be forked."""

    def __init__(self, alone: bool) -> None:
        memory = make_memory()
        bell, their_bell = socket.socketpair()
        self.side, their_side = socket.socketpair()
        self.theirs = [memory, their_bell.detach(), their_side.detach()]
        self.storage: socket.socket | None = None
        if alone:
            self.storage, their_storage = socket.socketpair()
            self.theirs.append(their_storage.detach())
        self.port = Port(memory, bell, is_worker=False)

    def close_theirs(self) -> None:
        for descriptor in self.theirs:
            os.close(descriptor)
        self.theirs = []
