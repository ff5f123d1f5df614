"""The supervisor's table of requests and sequences: their workers, late answers and numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bridle.aici.runtime import messages as m
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.storage import RequestState
from bridle.aici.runtime.worker_handle import WorkerHandle
from bridle.errors import InvalidRequest, Overloaded


@dataclass(slots=True, eq=False)
class RuntimeSequence:
    """One sequence, or an instance that has no sequence number yet. `error` is the reason if the sequence has ended."""

    key: int
    request: RequestState
    worker: WorkerHandle
    seq_id: int | None = None
    splits: bool = False  # forked by forking its process
    error: str | None = None
    is_outstanding: bool = False  # an op was sent and is not answered yet
    last_op: m.Step2 | m.PostPre | m.Mid1 | None = None  # the op that was sent last
    ready: m.SequenceAnswer | None = None  # an answer that came too late for its step
    misses: int = 0  # step limits that passed since `last_op`, by the clock
    asked_at: float = 0.0  # when `last_op` was sent
    allowance: float = 0.0  # seconds of processor time that the answer to `last_op` may take
    untold: list[tuple[str, str]] = field(default_factory=list)  # variables that the next op sets
    created: float = field(default_factory=time.monotonic)


class SequenceTable:
    """All sequences, by the engine's sequence number. Instances without a sequence number are listed by request. The
    main thread uses the table; side threads use it only for instances without a sequence number. Every method is a
    single atomic change or runs under its caller's lock."""

    def __init__(self, limits: RuntimeLimits) -> None:
        self._limits = limits
        self.by_id: dict[int, RuntimeSequence] = {}
        self.by_key: dict[int, RuntimeSequence] = {}
        self.pending: dict[str, RuntimeSequence] = {}
        self._next_key = 0
        self._tenants: dict[str, int] = {}

    def new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def check_room(self, tenant: str, in_the_making: list[str]) -> None:
        """Raise `Overloaded` if `tenant` cannot have another instance now. `in_the_making` lists the tenants of
        instances that are being created; these instances count too."""
        limits = self._limits
        mine = self._tenants.get(tenant, 0) + in_the_making.count(tenant)
        total = len(self.by_key) + len(in_the_making)
        if total >= limits.max_instances or mine >= limits.max_instances_per_user:
            raise Overloaded(
                f"too many controllers run: {total} of at most {limits.max_instances} instances, {mine} of at most "
                f"{limits.max_instances_per_user} of user {tenant!r}"
            )

    def add(self, sequence: RuntimeSequence) -> None:
        """Add a fork, or a new instance that no sequence has claimed."""
        request = sequence.request
        request.num_alive += 1
        request.num_ever += 1
        self.by_key[sequence.key] = sequence
        self._tenants[request.tenant] = self._tenants.get(request.tenant, 0) + 1
        if sequence.seq_id is None:
            self.pending[request.name] = sequence
        else:
            self.by_id[sequence.seq_id] = sequence

    def bind(self, req_id: str, seq_id: int) -> RuntimeSequence:
        """Give the pending instance of a request its sequence number. The request's name cannot be used a second
        time."""
        if seq_id in self.by_id:
            raise InvalidRequest(f"sequence {seq_id} exists already")
        sequence = self.pending.pop(req_id, None)
        if sequence is None:
            raise InvalidRequest(f"unknown req_id {req_id[:80]!r}: not instantiated, used before, or expired")
        sequence.seq_id = seq_id
        self.by_id[seq_id] = sequence
        return sequence

    def check_fork(self, request: RequestState) -> str | None:
        """Return the reason why a request cannot have another sequence now, or None."""
        limit = self._limits.max_forks
        if request.num_alive >= limit:
            return f"{request.num_alive + 1} sequences of one request exceed the limit of {limit} forks"
        return self.check_life(request, 1)

    def check_life(self, request: RequestState, more: int) -> str | None:
        """Return the reason why `more` further sequences exceed the total that a request may ever have, or None."""
        limit = self._limits.max_total_forks
        return f"more than {limit} sequences in the life of one request" if request.num_ever + more > limit else None

    def remove(self, sequence: RuntimeSequence) -> None:
        """Remove a sequence from the table. Idempotent."""
        if self.by_key.pop(sequence.key, None) is None:
            return
        if sequence.seq_id is not None:
            self.by_id.pop(sequence.seq_id, None)
        if self.pending.get(sequence.request.name) is sequence:
            del self.pending[sequence.request.name]
        request = sequence.request
        request.num_alive -= 1
        left = self._tenants.get(request.tenant, 0) - 1
        if left > 0:
            self._tenants[request.tenant] = left
        else:
            self._tenants.pop(request.tenant, None)
