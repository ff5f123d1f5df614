"""The adapters of one engine, which are loaded into memory in the background while the batch continues.

At each step, the engine asks which adapters are ready; the answer never blocks. Adapters that are not ready are loaded
in the background, and sequences that need them are scheduled later. The device (`AdapterDevice`) holds the weights.
`Residency` decides which adapters are kept and which are evicted, and `Mover` moves them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from bridle.errors import BridleError, EngineClosed, UnknownAdapter
from bridle.lora.cache_policy import AdapterStatus, CachedAdapter, Residency
from bridle.lora.device import AdapterDevice, AdapterLimits
from bridle.lora.files import AdapterFiles
from bridle.lora.transfer_threads import Mover
from bridle.threads import conclude_all


class AdapterPool:
    """Manages the adapters of one model on one device. Any thread may call the methods that register and remove
    adapters. Only the engine's thread may call the methods for requests and steps. When an adapter was loaded into
    memory, a loading thread calls `on_change`. `item_size` is the size of one value of the model; all sizes are in
    bytes. An adapter whose files could not be read is tried again after some time on `clock`, or when its files change.
    """

    def __init__(
        self,
        device: AdapterDevice,
        *,
        item_size: int,
        device_memory: int,
        host_memory: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.limits = AdapterLimits(device.layers, item_size, device_memory, host_memory)
        self._books = Residency(device_memory, host_memory)
        self._lock = threading.Condition()
        self._clock = clock
        self._mover = Mover(device, self._books, self._lock, self._end, lambda: self.on_change(), clock)
        self._fetches: dict[str, list[Future[None]]] = {}
        self._failures: dict[str, BridleError] = {}  # not yet reported to the engine

    # -- whoever manages adapters --------------------------------------------------------------------------------

    def check(self, files: AdapterFiles) -> None:
        """Raise `AdapterRefused` if the files are not for this model, or exceed the memory for adapters."""
        self.limits.check(files)

    def add(self, key: str, files: AdapterFiles) -> None:
        """Let requests use the adapter. If the adapter was removed but is still in use, it is restored. An adapter
        whose files could not be read may be tried again at once."""
        with self._lock:
            held = self._books.known.setdefault(key, CachedAdapter(key, files, self.limits.device_bytes(files)))
            held.failure = None
            self._books.removed.pop(key, None)

    def remove(self, key: str) -> None:
        """Forget the adapter, and free its memory when the last request that uses it has ended. Unknown keys are
        ignored."""
        with self._lock:
            held = self._books.known.get(key)
            if held is not None:
                self._books.removed[key] = held
                self._mover.wake()

    def status(self, key: str) -> AdapterStatus:
        with self._lock:
            held = self._books.known.get(key)
            return AdapterStatus() if held is None else self._books.status(held)

    def fetch(self, key: str) -> Future[None]:
        """Begin to read the adapter from disk. The future completes when the adapter is on the host or the device, and
        fails if the adapter cannot be read. Raises `UnknownAdapter`."""
        future: Future[None] = Future()
        with self._lock:
            if self._mover.is_closed:
                raise EngineClosed("the model of this adapter is closed")
            held = self._find(key)
            failure = self._failure_of(held)
            if failure is not None:
                future.set_exception(failure)
            elif self._books.is_in_memory(key):
                future.set_result(None)
            else:
                self._books.fetched[key] = held
                self._fetches.setdefault(key, []).append(future)
                self._mover.wake()
        return future

    @property
    def num_placed(self) -> int:
        """Return how many times adapters were loaded to the device."""
        return self._books.num_placed

    def counts(self) -> dict[str, int]:
        """Return numbers of adapters, reads and evictions for the engine's statistics."""
        with self._lock:
            return self._books.counts()

    def close(self) -> None:
        """End the threads; futures that are not done fail with `EngineClosed`. Idempotent."""
        with self._lock:
            self._mover.stop()
            for key in list(self._fetches):
                self._settle(key, EngineClosed("the model was closed"))
        self._mover.join()

    # -- the engine's thread -------------------------------------------------------------------------------------

    def check_known(self, key: str) -> None:
        """Raise `UnknownAdapter` unless requests may use the adapter. Raise the error of the last attempt to read the
        adapter, if it recently failed. Any thread may call this method."""
        with self._lock:
            failure = self._failure_of(self._find(key))
            if failure is not None:
                raise failure

    def open(self, key: str) -> None:
        """Record that a request uses the adapter from now on, and read the adapter if it is not in memory. Raises
        `UnknownAdapter`."""
        with self._lock:
            held = self._find(key)
            held.num_users += 1
            failure = self._failure_of(held)
            if failure is not None:
                self._failures[key] = failure
            elif not self._books.is_in_memory(key):
                self._books.fetched[key] = held  # read ahead, since the request may wait for its turn anyway
                self._mover.wake()

    def leave(self, key: str) -> None:
        """Release the adapter, because a request that used it has ended."""
        with self._lock:
            held = self._books.known[key]
            held.num_users -= 1
            if key in self._books.removed and not held.num_users:
                self._mover.wake()

    def begin_step(self, keys: Sequence[str]) -> set[str]:
        """Return the adapters among `keys`, the most urgent first, that the next step can compute with. The other
        adapters among `keys` are loaded in the background."""
        with self._lock:
            self._mover.note_loss()
            available = self._books.begin_step(keys)
            if len(available) < len(keys):
                self._mover.wake()
            return available

    def take_failures(self) -> dict[str, BridleError]:
        """Return the adapters in use whose files could not be read since the last call of this method, with the
        errors."""
        if not self._failures:
            return {}
        with self._lock:
            failures, self._failures = self._failures, {}
        return failures

    # -- helpers, with the lock held -----------------------------------------------------------------------------

    def _find(self, key: str) -> CachedAdapter:
        held = self._books.known.get(key)
        if held is None or key in self._books.removed:
            raise UnknownAdapter(f"the adapter {key.partition('#')[0]!r} was removed", "adapter")
        return held

    def _failure_of(self, held: CachedAdapter) -> BridleError | None:
        """Return the error of the last attempt to read the adapter if another attempt would fail, too; otherwise None.
        This method forgets an error that is no longer valid."""
        if held.failure is not None and held.failure.holds(self._clock()):
            return held.failure.again()
        held.failure = None
        return None

    def _end(self, held: CachedAdapter, error: BridleError | None) -> None:
        """Record that the adapter was read to the host, or the error if it cannot be read."""
        if error is not None and held.num_users:
            self._failures[held.key] = error
        self._books.fetched.pop(held.key, None)
        self._settle(held.key, error)

    def _settle(self, key: str, error: BridleError | None) -> None:
        """Complete the futures that wait for the adapter. If `error` is given, the futures fail with this error."""
        conclude_all(self._fetches.pop(key, ()), error)
