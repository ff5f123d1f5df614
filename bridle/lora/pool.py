"""The adapters of one engine: two threads bring them into memory while the batch goes on.

The engine asks at each step which adapters it can compute with, and is never kept waiting; what is missing comes in the
background, and the sequences that want it sit out the steps until it is there. Where adapters really are is the
device's business (`AdapterDevice`), who stays and who leaves is `Residency`'s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, cast

from bridle.errors import BridleError, EngineClosed, ModelUnavailable, ShardUnavailable, UnknownAdapter
from bridle.lora.files import AdapterFiles
from bridle.lora.layers import AdapterLimits, LayerShape
from bridle.lora.residency import Held, Residency
from bridle.lora.status import AdapterStatus

_log = logging.getLogger(__name__)

#: Pause before a device that was away is tried again, in seconds.
_AWAY_SECONDS = 0.2


class AdapterDevice(Protocol):
    """Where adapters are kept and computed with, in this process or another. Called from any thread; calls about one
    adapter come one after the other. All but `read_adapter` are quick. Each raises `ShardUnavailable` when the device
    is away."""

    @property
    def adapter_layers(self) -> Mapping[str, LayerShape]:
        """The layers that take adapters, by name; empty if none does."""
        raise NotImplementedError

    @property
    def adapter_epoch(self) -> int:
        """Another number whenever all that was read or placed is lost."""
        raise NotImplementedError

    def read_adapter(self, key: str, files: AdapterFiles) -> None:
        """From disk to the host's memory. Raises `AdapterRefused`."""

    def place_adapter(self, key: str) -> None:
        """From the host to where the model computes."""

    def displace_adapter(self, key: str) -> None:
        """Give up its place on the device. What is not there is ignored."""

    def drop_adapter(self, key: str) -> None:
        """Give up its place on the host. What is not there is ignored."""

    def drop_adapters(self) -> None:
        """Give up all of them, on both tiers."""


def as_device(executor: object) -> AdapterDevice | None:
    """`executor` as a device, if it applies adapters at all."""
    return cast(AdapterDevice, executor) if getattr(executor, "adapter_layers", None) else None


class AdapterPool:
    """Keeps the adapters of one model on one device. The first group of methods is for whoever manages them, from any
    thread; the second for the engine's thread. `on_change` is called, from any thread, when something came in.

    `item_size` is the size of one of the model's numbers, both memories are in bytes.
    """

    def __init__(self, device: AdapterDevice, *, item_size: int, device_memory: int, host_memory: int) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._device = device
        self.limits = AdapterLimits(device.adapter_layers, item_size, device_memory, host_memory)
        self._books = Residency(device_memory, host_memory)
        self._changed = threading.Condition()
        self._num_changes = 0
        self._epoch = device.adapter_epoch
        self._fetches: dict[str, list[Future[None]]] = {}
        self._failures: dict[str, BridleError] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    # -- whoever manages adapters --------------------------------------------------------------------------------

    def check(self, files: AdapterFiles) -> None:
        """Raise `AdapterRefused` if the files are not for this model, or need more memory than there is."""
        self.limits.check(files)

    def add(self, key: str, files: AdapterFiles) -> None:
        """The adapter may be used. One that was removed and is still in use is there again."""
        with self._changed:
            if key not in self._books.known:
                self._books.known[key] = Held(key, files, self.limits.device_bytes(files))
            self._books.removed.pop(key, None)

    def remove(self, key: str) -> None:
        """Take it out of memory once its last user is done. Unknown keys are ignored."""
        with self._changed:
            held = self._books.known.get(key)
            if held is not None:
                self._books.removed[key] = held
                self._wake()

    def status(self, key: str) -> AdapterStatus:
        with self._changed:
            held = self._books.known.get(key)
            return AdapterStatus() if held is None else self._books.status(held)

    def fetch(self, key: str) -> Future[None]:
        """Begin to read it; done when it is on the host or the device. Raises `UnknownAdapter`."""
        future: Future[None] = Future()
        with self._changed:
            if self._is_closed:
                raise EngineClosed("the model is closed")
            held = self._find(key)
            if key in self._books.on_host or key in self._books.on_device:
                future.set_result(None)
                return future
            held.error = None
            self._books.fetched[key] = held
            self._fetches.setdefault(key, []).append(future)
            self._wake()
        return future

    @property
    def num_placed(self) -> int:
        """How many times an adapter was brought to the device."""
        return self._books.num_placed

    def counts(self) -> dict[str, int]:
        """What the engine's statistics tell of adapters."""
        with self._changed:
            return self._books.counts()

    def close(self) -> None:
        """End the threads; what is waited for fails with `EngineClosed`. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._wake()
            for held in list(self._books.fetched.values()):
                self._settle(held, EngineClosed("the model was closed"))
        for thread in self._threads:
            thread.join()

    # -- the engine's thread -------------------------------------------------------------------------------------

    def check_known(self, key: str) -> None:
        """Raise `UnknownAdapter` unless requests may use it. From any thread."""
        with self._changed:
            self._find(key)

    def open(self, key: str) -> None:
        """A request uses it from now on; it is read, if it is not in memory. Raises `UnknownAdapter`."""
        with self._changed:
            held = self._find(key)
            held.num_users += 1
            held.error = None
            if key not in self._books.on_host and key not in self._books.on_device:
                self._books.fetched[key] = held  # read ahead: the request may have to wait for its turn
                self._wake()

    def leave(self, key: str) -> None:
        """A request that used it is over."""
        with self._changed:
            held = self._books.known[key]
            held.num_users -= 1
            if key in self._books.removed and not held.num_users:
                self._wake()

    def begin_step(self, keys: Sequence[str]) -> set[str]:
        """What of `keys`, the most urgent first, the next step can compute with. The rest is brought in."""
        with self._changed:
            if self._epoch != self._device.adapter_epoch:
                self._epoch = self._device.adapter_epoch
                self._books.lose_everything()
            available = self._books.begin_step(keys)
            if len(available) < len(keys):
                self._wake()
            return available

    def take_failures(self) -> dict[str, BridleError]:
        """Adapters in use that could not be had, since the last call, and why."""
        if not self._failures:
            return {}
        with self._changed:
            failures, self._failures = self._failures, {}
        return failures

    # -- helpers, with the lock held -----------------------------------------------------------------------------

    def _find(self, key: str) -> Held:
        held = self._books.known.get(key)
        if held is None or key in self._books.removed:
            raise UnknownAdapter(f"there is no adapter {key.partition('#')[0]!r} any more", "adapter")
        return held

    def _wake(self) -> None:
        """Let the threads look; start them when they are needed first."""
        if not self._threads and not self._is_closed:
            for name, work in (("read", self._read_next), ("place", self._place_next)):
                thread = threading.Thread(target=self._run, args=(work,), name=f"bridle-adapters-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._num_changes += 1
        self._changed.notify_all()

    def _settle(self, held: Held, error: BridleError | None) -> None:
        """Those who wait for it on the host are told."""
        self._books.fetched.pop(held.key, None)
        for future in self._fetches.pop(held.key, ()):
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    # -- the threads ---------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], bool]) -> None:
        """Work while there is work, then wait for the next change."""
        while not self._is_closed:
            seen = self._num_changes
            try:
                if work():
                    self._tell()
                    continue
            except ShardUnavailable:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _AWAY_SECONDS)
                continue
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._is_closed or self._num_changes != seen)  # type: ignore[misc]

    def _tell(self) -> None:
        with self._changed:
            self._num_changes += 1
            self._changed.notify_all()
        self.on_change()

    def _read_next(self) -> bool:
        """Read one adapter that is awaited; whether there was any."""
        books = self._books
        with self._changed:
            held = books.next_to_read()
            leavers = None if held is None else books.leavers_of_host(held.host_bytes)
            if held is None or leavers is None:
                return False
            for other in leavers:
                del books.on_host[other.key]
            books.num_left_host += len(leavers)
            moving, epoch = (held, *leavers), self._epoch
            _set_moving(moving, True)
        error = self._try(held, lambda: self._read(held, leavers))
        with self._changed:
            _set_moving(moving, False)
            if error is not None:
                self._fail(held, error)
            elif epoch == self._device.adapter_epoch:
                books.on_host[held.key] = held
                books.num_reads += 1
                self._settle(held, None)
        return True

    def _read(self, held: Held, leavers: Iterable[Held]) -> None:
        for other in leavers:
            self._device.drop_adapter(other.key)
        self._device.read_adapter(held.key, held.files)

    def _place_next(self) -> bool:
        """Drop what was removed, or place one adapter that is awaited; whether there was anything to do."""
        books = self._books
        with self._changed:
            gone = books.next_to_drop()
            if gone is not None:
                books.on_host.pop(gone.key, None)
                books.on_device.pop(gone.key, None)
                _set_moving((gone,), True)
        if gone is not None:
            self._drop(gone)
            return True
        with self._changed:
            held = books.next_to_place()
            leavers = None if held is None else books.leavers_of_device(held.device_bytes)
            if held is None or leavers is None:
                return False
            for other in leavers:
                del books.on_device[other.key]
            books.num_left_device += len(leavers)
            moving, epoch = (held, *leavers), self._epoch
            _set_moving(moving, True)
        error = self._try(held, lambda: self._place(held, leavers))
        with self._changed:
            _set_moving(moving, False)
            if error is not None:
                self._fail(held, error)
            elif epoch == self._device.adapter_epoch:
                books.note_placed(held)
                books.num_placed += 1
        return True

    def _place(self, held: Held, leavers: Iterable[Held]) -> None:
        for other in leavers:
            self._device.displace_adapter(other.key)
        self._device.place_adapter(held.key)

    def _drop(self, held: Held) -> None:
        def drop() -> None:
            self._device.displace_adapter(held.key)
            self._device.drop_adapter(held.key)

        self._try(held, drop)
        with self._changed:
            _set_moving((held,), False)
            if held.key in self._books.removed and not held.num_users:
                self._books.forget(held)
                self._settle(held, UnknownAdapter("the adapter was removed", "adapter"))

    def _try(self, held: Held, work: Callable[[], None]) -> BridleError | None:
        """What went wrong, if anything did."""
        try:
            work()
        except BridleError as error:
            return error
        except Exception as error:
            _log.exception("adapter %s", held.key)
            return ModelUnavailable(f"the adapter cannot be loaded: {type(error).__name__}: {error}")
        return None

    def _fail(self, held: Held, error: BridleError) -> None:
        """It cannot be had: whoever waits for it is told. That the device is away is none of its faults. With the lock
        held."""
        if isinstance(error, ShardUnavailable):
            raise error
        _log.warning("adapter %s: %s", held.key, error)
        held.error = error
        self._books.wanted.pop(held.key, None)
        if held.num_users:
            self._failures[held.key] = error
        self._settle(held, error)


def _set_moving(group: Iterable[Held], is_moving: bool) -> None:
    for held in group:
        held.is_moving = is_moving
