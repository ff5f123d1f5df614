"""The supervisor's table of sequences, shared by its threads: it reserves keys, expires instances, and cleans up after
a worker's death."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import msgspec

from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.module_metadata import ModuleMetadata
from bridle.aici.runtime.sequences import RuntimeSequence, SequenceTable
from bridle.aici.runtime.storage import RequestState
from bridle.aici.runtime.worker_handle import WorkerHandle
from bridle.errors import InvalidRequest

_facts = msgspec.json.Decoder(ModuleMetadata)


class Registry:
    """Protects the table by a lock. The main thread holds `lock` during a step. Side threads hold `lock` only for a
    moment."""

    def __init__(self, limits: RuntimeLimits) -> None:
        self._limits = limits
        self.lock = threading.RLock()
        self.table = SequenceTable(limits)
        self._reserved: dict[str, str] = {}  # requests whose instances are being created, with their tenants
        self.doomed: list[RuntimeSequence] = []  # sequences that the main thread must release

    def facts(self, text: str) -> ModuleMetadata:
        """Decode the metadata that the compiler stored with a module."""
        return _facts.decode(text)

    @contextlib.contextmanager
    def reserve(self, state: RequestState) -> Iterator[int]:
        """Reserve a key for an instance in creation. Raises `InvalidRequest` if the request already has an instance."""
        with self.lock:
            if state.name in self._reserved or state.name in self.table.pending:
                raise InvalidRequest(f"req_id {state.name[:80]!r} is in use already", "req_id")
            self.table.check_room(state.tenant, list(self._reserved.values()))
            self._reserved[state.name] = state.tenant
            key = self.table.new_key()
        try:
            yield key
        finally:
            with self.lock:
                self._reserved.pop(state.name, None)

    def add(self, key: int, state: RequestState, worker: WorkerHandle, splits: bool) -> None:
        """Add an instance that was created and waits for a sequence."""
        with self.lock:
            sequence = RuntimeSequence(key, state, worker, splits=splits)
            if worker.is_dead:
                sequence.error = "Worker: the process died"
            self.table.add(sequence)
            self._reserved.pop(state.name, None)  # from now on the instance itself is counted

    def discard(self, name: str) -> None:
        """Drop the instance of a request that will never run."""
        with self.lock:
            sequence = self.table.pending.pop(name, None)
            if sequence is not None:
                self.doomed.append(sequence)

    def expire(self) -> None:
        """Drop instances that no sequence has claimed for too long."""
        limit = self._limits.max_unbound_time / 1000
        with self.lock:
            for name, sequence in list(self.table.pending.items()):
                if time.monotonic() - sequence.created > limit:
                    self.discard(name)

    def worker_died(self, worker: WorkerHandle) -> dict[str, str]:
        """End the sequences of a dead worker. The sequences stay in the table until the engine frees them. Returns the
        names of the requests that lost a sequence, with their trace ids where known."""
        lost = {}
        for sequence in list(self.table.by_key.values()):
            if sequence.worker is worker and sequence.error is None:
                sequence.error = "Worker: the process died"
                if sequence.request.trace is not None:
                    lost[sequence.request.name] = sequence.request.trace
        return lost
