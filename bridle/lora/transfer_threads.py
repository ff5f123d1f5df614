"""Two threads load adapters into memory and evict them, while the batch continues.

The pool's `Residency` decides which transfer is next. The records of `Residency` are read and changed only with the
pool's lock held. Calls to the device, which may be slow, are made without the lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bridle.errors import AdapterRefused, BridleError, ModelUnavailable, ShardUnavailable, UnknownAdapter
from bridle.lora.cache_policy import CachedAdapter, Residency
from bridle.lora.device import AdapterDevice
from bridle.lora.negative_cache import FAILURE_SECONDS, CachedFailure, stamp_of

_log = logging.getLogger(__name__)

#: Pause before a device that could not be reached is tried again, in seconds.
AWAY_SECONDS = 0.2

#: Called with the lock held when an adapter is on the host, or with the error when it cannot be read.
OnEnd = Callable[[CachedAdapter, BridleError | None], None]


@dataclass(frozen=True, slots=True)
class _Move:
    """A transfer: one adapter is loaded into a tier, and the adapters `leavers` are evicted from it. `epoch` is the
    device's epoch at the beginning of the transfer."""

    held: CachedAdapter
    leavers: Sequence[CachedAdapter]
    epoch: int


@dataclass(eq=False, repr=False)
class Mover:
    """Moves adapters between disk, host and device as the `Residency` `books` decides. `changed` is a condition whose
    lock protects `books`; the condition is notified of every change. When an adapter was loaded or evicted, `on_change`
    is called without the lock."""

    _device: AdapterDevice
    _books: Residency
    _changed: threading.Condition
    _on_end: OnEnd
    _on_change: Callable[[], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._epoch = self._device.epoch
        self._num_changes = 0
        self._threads: list[threading.Thread] = []
        self.is_closed = False

    # -- with the lock held ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the threads so that they look for transfers. The first call starts the threads."""
        if not self._threads and not self.is_closed:
            for name, work in (("read", self._read_next), ("place", self._place_next)):
                thread = threading.Thread(target=self._run, args=(work,), name=f"bridle-adapters-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._num_changes += 1
        self._changed.notify_all()

    def note_loss(self) -> None:
        """If the device has lost all adapters, record this, so that the adapters are read again."""
        if self._epoch != self._device.epoch:
            self._epoch = self._device.epoch
            self._books.lose_everything()

    def stop(self) -> None:
        """Let the threads end after their current transfer. Idempotent."""
        self.is_closed = True
        self.wake()

    # -- without it --------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()

    # -- the threads -------------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], bool]) -> None:
        """The main loop of a thread. The loop calls `work` until no transfer is left, then waits for the next
        change."""
        while not self.is_closed:
            seen = self._num_changes
            try:
                if work():
                    with self._changed:
                        self.wake()
                    self._on_change()
                    continue
            except ShardUnavailable:
                with self._changed:
                    self._changed.wait_for(lambda: self.is_closed, AWAY_SECONDS)
                continue
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self.is_closed or self._num_changes != seen)  # type: ignore[misc]

    def _read_next(self) -> bool:
        """Read from disk one adapter that is needed. Return whether an adapter had to be read."""
        books = self._books
        with self._changed:
            held = books.next_to_read()
            leavers = None if held is None else books.leavers_of_host(held.host_bytes)
            move = self._begin(held, leavers, books.on_host)
            if move is None:
                return False
            books.num_left_host += len(move.leavers)
        self._carry_out(move, self._read, self._note_read)
        return True

    def _read(self, move: _Move) -> None:
        for other in move.leavers:
            self._device.drop(other.key)
        self._device.read(move.held.key, move.held.files)

    def _note_read(self, held: CachedAdapter) -> None:
        self._books.on_host[held.key] = held
        self._books.num_reads += 1
        self._on_end(held, None)

    def _place_next(self) -> bool:
        """Free the memory of one removed adapter, or load to the device one adapter that requests wait for. Returns
        whether there was an adapter to free or to load."""
        return self._drop_next() or self._place_awaited()

    def _place_awaited(self) -> bool:
        books = self._books
        with self._changed:
            held = books.next_to_place()
            leavers = None if held is None else books.leavers_of_device(held.device_bytes)
            move = self._begin(held, leavers, books.on_device)
            if move is None:
                return False
            books.num_left_device += len(move.leavers)
        self._carry_out(move, self._place, self._note_placed)
        return True

    def _place(self, move: _Move) -> None:
        for other in move.leavers:
            self._device.displace(other.key)
        self._device.place(move.held.key)

    def _note_placed(self, held: CachedAdapter) -> None:
        self._books.note_placed(held)
        self._books.num_placed += 1

    def _begin(
        self, held: CachedAdapter | None, leavers: list[CachedAdapter] | None, tier: dict[str, CachedAdapter]
    ) -> _Move | None:
        """Begin a transfer: remove the adapters `leavers` from the tier. Returns None if there is no adapter to load,
        or no memory for it. The caller must hold the pool's lock."""
        if held is None or leavers is None:
            return None
        for other in leavers:
            del tier[other.key]
        _set_moving((held, *leavers), True)
        return _Move(held, leavers, self._epoch)

    def _carry_out(self, move: _Move, work: Callable[[_Move], None], note: Callable[[CachedAdapter], None]) -> None:
        """Carry out a transfer on the device, and record its outcome."""
        failure = self._try(move.held, lambda: work(move))
        with self._changed:
            _set_moving((move.held, *move.leavers), False)
            if failure is not None:
                self._fail(move.held, failure)
            elif move.epoch == self._device.epoch:
                note(move.held)

    def _drop_next(self) -> bool:
        """Free the memory of one removed adapter that no request uses. Return whether an adapter had to be read."""
        with self._changed:
            gone = self._books.next_to_drop()
            if gone is None:
                return False
            self._books.on_host.pop(gone.key, None)
            self._books.on_device.pop(gone.key, None)
            _set_moving((gone,), True)
        self._drop(gone)
        return True

    def _drop(self, held: CachedAdapter) -> None:
        def drop() -> None:
            self._device.displace(held.key)
            self._device.drop(held.key)

        self._try(held, drop)
        with self._changed:
            _set_moving((held,), False)
            if held.key in self._books.removed and not held.num_users:
                self._books.forget(held)
                self._on_end(held, UnknownAdapter("the adapter was removed", "adapter"))

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _try(self, held: CachedAdapter, work: Callable[[], None]) -> CachedFailure | None:
        """Call `work`; return its failure, or None if it succeeds."""
        folder, name = held.files.folder, held.key.partition("#")[0]
        stamp = stamp_of(folder)
        error: BridleError
        try:
            work()
            return None
        except AdapterRefused as refusal:  # clients read this message, which must not show paths of this machine
            error = AdapterRefused(str(refusal).replace(str(folder), name), refusal.param)
        except BridleError as other:
            error = other
        except Exception as fault:
            _log.exception("adapter %s cannot be loaded", held.key)
            reason = f"{type(fault).__name__}: {fault}".replace(str(folder), name)
            error = ModelUnavailable(f"the adapter cannot be loaded: {reason}", FAILURE_SECONDS)
        return CachedFailure(error, folder, stamp, self.clock() + FAILURE_SECONDS)

    def _fail(self, held: CachedAdapter, failure: CachedFailure) -> None:
        """Record that an adapter cannot be loaded, so that requests stop waiting for it. If the device is unreachable,
        raise the device's error instead, so that loading the adapter is tried again. The caller must hold the pool's
        lock."""
        if isinstance(failure.error, ShardUnavailable):
            raise failure.again()
        _log.warning("adapter %s in %s cannot be loaded: %s", held.key, held.files.folder, failure.error)
        self._books.note_failed(held, failure)
        self._on_end(held, failure.again())


def _set_moving(group: Iterable[CachedAdapter], is_moving: bool) -> None:
    for held in group:
        held.is_moving = is_moving
