"""Chooses the adapters of a step: a limited number of the adapters on the device.

Sequences whose adapter is not chosen skip the step. If more adapters are ready than one step can take, the least
recently used come first. So each adapter gets its turn. Sequences without an adapter may be in every step. While no
request has an adapter, this module does no work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from bridle.engine.interfaces import AdapterStore
from bridle.engine.sequence import Sequence
from bridle.errors import BridleError, UnknownAdapter


class LoRAScheduler:
    """Chooses at most `max_adapters` adapters for a step, from those that `store` has on the device. If `store` is
    None, the device has all adapters."""

    def __init__(self, max_adapters: int, store: AdapterStore | None = None) -> None:
        self.max_adapters = max_adapters
        self._store = store
        #: Adapters in use that cannot be loaded, with the error; each is returned once.
        self.take_failures: Callable[[], Mapping[str, BridleError]] = dict if store is None else store.take_failures
        #: Live requests by adapter. While it is empty, steps need no choice.
        self.num_users: Counter[str] = Counter()
        self._chosen: dict[str, int] = {}  # the last step of each adapter in use
        self._step = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def check(self, adapter: str) -> None:
        """Raise `UnknownAdapter` if the adapter no longer exists. Safe from any thread."""
        if self._store is not None:
            self._store.check_known(adapter)

    def knows(self, adapter: str) -> bool:
        """Return whether the adapter still exists."""
        try:
            self.check(adapter)
        except UnknownAdapter:
            return False
        return True

    def open(self, adapter: str) -> None:
        """Record that a request with the adapter begins. Raises `UnknownAdapter`."""
        if self._store is not None:
            self._store.open(adapter)
        self.num_users[adapter] += 1

    def leave(self, adapter: str) -> None:
        """Record that a request with the adapter has ended."""
        self.num_users[adapter] -= 1
        if not self.num_users[adapter]:
            del self.num_users[adapter]
            self._chosen.pop(adapter, None)
        if self._store is not None:
            self._store.leave(adapter)

    def counts(self) -> Mapping[str, int]:
        """Return the adapter counts for the statistics. Safe from any thread."""
        return {} if self._store is None else self._store.counts()

    def close(self) -> None:
        """Stop loading adapters to the device. Idempotent."""
        if self._store is not None:
            self._store.close()

    # -- a step --------------------------------------------------------------------------------------------------

    def begin_step(
        self, running: Iterable[Sequence], next_in_line: Iterable[Sequence], waiting: Iterable[Sequence]
    ) -> None:
        """Choose the adapters of the next step; sequences of other adapters skip it. `next_in_line` are the sequences
        of `waiting` that may be admitted in that step."""
        self._step += 1
        running = list(running)
        chosen = self._choose([*_adapters(chain(running, next_in_line))])
        for seq in chain(running, waiting):
            if seq.request.adapter is not None:
                seq.queue.adapter_not_scheduled = seq.request.adapter not in chosen

    def _choose(self, wanted: list[str]) -> set[str]:
        """Return the adapters of a step. Adapters that were chosen longest ago come first, and among equals the most
        urgent ones."""
        if self._store is not None:
            available = self._store.begin_step(wanted)
            wanted = [key for key in wanted if key in available]
        if len(wanted) > self.max_adapters:
            wanted = sorted(wanted, key=lambda key: self._chosen.get(key, 0))[: self.max_adapters]
        self._chosen.update(dict.fromkeys(wanted, self._step))
        return set(wanted)


def _adapters(sequences: Iterable[Sequence]) -> dict[str, None]:
    """Return, in order, the adapters of the sequences that do not wait for their controllers."""
    keys = (seq.request.adapter for seq in sequences if not seq.is_held)
    return dict.fromkeys(key for key in keys if key is not None)
