"""Decides which adapters are in memory, and which adapter is evicted to make space for another one. This module only
keeps records; it moves no data and has no threads. There are two tiers, each with a limit in bytes. The host holds
adapters that were read from disk; the device holds adapters that steps can use. In both tiers, the least recently used
adapter is evicted first. If requests need more adapters at once than fit on the device, the adapters take turns. A
needed adapter stays on the device for at least `TURN_STEPS` steps in which it can be used, so that no adapter starves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from bridle.lora.files import AdapterFiles
from bridle.lora.negative_cache import CachedFailure

#: Number of steps that an adapter may be used before another waiting adapter can replace it.
TURN_STEPS = 8

#: `known`: on disk only. `loading`: being moved into memory. `host`: in the computer's memory. `device`: in the memory
#: of the model's device. `failed`: the adapter could not be read; the next use tries again.
AdapterState = Literal["known", "loading", "host", "device", "failed"]


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """The state of an adapter: whether it is in memory, and how many requests need it. `num_users` counts the requests
    that use the adapter now, or wait for it."""

    state: AdapterState = "known"
    error: str | None = None
    num_users: int = 0


@dataclass(slots=True, eq=False)
class CachedAdapter:
    """One adapter. `last_used` is the counter value when the adapter was last used. `num_turns` is the number of steps
    in which the adapter was on the device and available since it was last placed there."""

    key: str
    files: AdapterFiles
    device_bytes: int
    num_users: int = 0
    last_used: int = 0
    num_turns: int = 0
    is_moving: bool = False  # a loading thread works on it
    is_leaving: bool = False  # its memory on the device is reserved for another adapter
    failure: CachedFailure | None = field(default=None, repr=False)  # of the last attempt, until the next attempt

    @property
    def host_bytes(self) -> int:
        return self.files.num_bytes


class Residency:
    """The records of the adapters of one device. Each group of adapters is a dictionary by key."""

    def __init__(self, device_memory: int, host_memory: int) -> None:
        self.device_memory = device_memory
        self.host_memory = host_memory
        self.known: dict[str, CachedAdapter] = {}
        self.on_host: dict[str, CachedAdapter] = {}
        self.on_device: dict[str, CachedAdapter] = {}
        self.wanted: dict[str, CachedAdapter] = {}  # adapters that steps wait for, the longest waiting first
        self.fetched: dict[str, CachedAdapter] = {}  # adapters that a caller wants on the host
        self.removed: dict[str, CachedAdapter] = {}  # adapters that were removed, and may not be requested any more
        self.num_reads = 0
        self.num_placed = 0
        self.num_left_host = 0  # evictions from the host
        self.num_left_device = 0
        self._busy: frozenset[str] = frozenset()  # adapters that the current step uses
        self._ticks = count(1)

    # -- what steps ask ------------------------------------------------------------------------------------------

    def begin_step(self, keys: Sequence[str]) -> set[str]:
        """Return the adapters among `keys` that the next step can compute with. The returned adapters stay on the
        device until the next call. All other adapters in `keys` are marked as wanted, so that they are loaded. Adapters
        outside `keys` are no longer wanted.
        """
        self._busy = frozenset(keys)
        for key in self.wanted.keys() - self._busy:
            del self.wanted[key]
        for key in keys:
            if key not in self.on_device:
                self.wanted.setdefault(key, self.known[key])
        self._promise_places()
        available = {key for key in keys if key in self.on_device and not self.on_device[key].is_leaving}
        for key in available:
            held = self.on_device[key]
            held.last_used = next(self._ticks)
            held.num_turns += 1
        return available

    def _promise_places(self) -> None:
        """If an adapter waits for device memory and none is free, mark adapters whose turn has ended as leaving."""
        for held in self.on_device.values():
            held.is_leaving = False
        first = self.next_to_place()
        if first is None:
            return
        missing = first.device_bytes - self._room_on_device()
        missing -= sum(held.device_bytes for held in self.on_device.values() if self._is_idle(held))
        for held in sorted(self.on_device.values(), key=_last_used):
            if missing <= 0:
                return
            if not self._is_idle(held) and held.num_turns >= TURN_STEPS:
                held.is_leaving = True
                missing -= held.device_bytes

    def _is_idle(self, held: CachedAdapter) -> bool:
        return held.key not in self._busy

    # -- what loading threads ask --------------------------------------------------------------------------------

    def next_to_read(self) -> CachedAdapter | None:
        """Return the adapter to read from disk next; None if no adapter needs to be read."""
        for held in self._awaited():
            if not self.is_in_memory(held.key) and not held.is_moving and held.failure is None:
                return held
        return None

    def next_to_place(self) -> CachedAdapter | None:
        """Return the adapter to place on the device next: the adapter on the host that has waited longest, whatever its
        size."""
        for key, held in self.wanted.items():
            if key in self.on_host and key not in self.on_device and not held.is_moving and held.failure is None:
                return held
        return None

    def next_to_drop(self) -> CachedAdapter | None:
        """Return a removed adapter whose memory can be freed, because no request uses it; None if there is no such
        adapter."""
        for held in self.removed.values():
            if held.num_users == 0 and not held.is_moving:
                return held
        return None

    def is_in_memory(self, key: str) -> bool:
        """Return whether the adapter is on the host or on the device."""
        return key in self.on_host or key in self.on_device

    def leavers_of_host(self, num_bytes: int) -> list[CachedAdapter] | None:
        """Return the adapters to evict from the host so that `num_bytes` fit; None if that is impossible now."""
        free = self.host_memory - sum(held.host_bytes for held in self.on_host.values())
        can_leave = [
            held
            for key, held in self.on_host.items()
            if not held.is_moving and (key in self.on_device or key not in self.wanted)
        ]
        return _enough(can_leave, num_bytes - free, lambda held: held.host_bytes)

    def leavers_of_device(self, num_bytes: int) -> list[CachedAdapter] | None:
        """Return the adapters to evict from the device so that `num_bytes` fit; None if that is impossible now.
        Adapters that the current step uses are not evicted."""
        can_leave = [
            held for held in self.on_device.values() if not held.is_moving and (held.is_leaving or self._is_idle(held))
        ]
        return _enough(can_leave, num_bytes - self._room_on_device(), lambda held: held.device_bytes)

    def _room_on_device(self) -> int:
        return self.device_memory - sum(held.device_bytes for held in self.on_device.values())

    def _awaited(self) -> Iterator[CachedAdapter]:
        yield from self.wanted.values()
        yield from self.fetched.values()

    # -- coming and going ----------------------------------------------------------------------------------------

    def note_placed(self, held: CachedAdapter) -> None:
        """Record that the adapter is on the device."""
        held.num_turns = 0
        held.is_leaving = False
        self.on_device[held.key] = held
        self.wanted.pop(held.key, None)

    def note_failed(self, held: CachedAdapter, failure: CachedFailure) -> None:
        """Record that the adapter could not be read, so that no step waits for it."""
        held.failure = failure
        self.wanted.pop(held.key, None)
        self.fetched.pop(held.key, None)

    def lose_everything(self) -> None:
        """Clear the records of both tiers, because a new device without adapters replaced the old one."""
        self.on_device.clear()
        self.on_host.clear()

    def forget(self, held: CachedAdapter) -> None:
        """Remove the adapter from all groups."""
        for group in (self.known, self.on_host, self.on_device, self.wanted, self.fetched, self.removed):
            group.pop(held.key, None)

    def counts(self) -> dict[str, int]:
        """Return the number of adapters in each group, and how many adapters were loaded and evicted."""
        return {
            "num_adapters": len(self.known) - len(self.removed),
            "num_adapters_on_host": len(self.on_host),
            "num_adapters_on_device": len(self.on_device),
            "num_adapter_reads": self.num_reads,
            "num_adapter_placements": self.num_placed,
            "num_adapter_host_evictions": self.num_left_host,
            "num_adapter_device_evictions": self.num_left_device,
        }

    def status(self, held: CachedAdapter) -> AdapterStatus:
        """Return the state of the adapter."""
        if held.failure is not None:
            return AdapterStatus("failed", str(held.failure.error), held.num_users)
        if held.key in self.on_device:
            return AdapterStatus("device", None, held.num_users)
        if held.key in self.on_host:
            return AdapterStatus("host", None, held.num_users)
        is_coming = held.is_moving or held.key in self.fetched or held.key in self.wanted
        return AdapterStatus("loading" if is_coming else "known", None, held.num_users)


def _enough(
    candidates: list[CachedAdapter], missing: int, size: Callable[[CachedAdapter], int]
) -> list[CachedAdapter] | None:
    """Return the least recently used `candidates` whose sizes add up to at least `missing` bytes. Return None if all
    candidates together are smaller."""
    chosen = []
    for held in sorted(candidates, key=_last_used):
        if missing <= 0:
            break
        chosen.append(held)
        missing -= size(held)
    return chosen if missing <= 0 else None


def _last_used(held: CachedAdapter) -> int:
    return held.last_used
