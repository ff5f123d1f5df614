"""Active requests: how they begin and end.

A request holds its adapter and its images until its last output has ended. A request ends early if it is cancelled,
misses its deadline, or loses its adapter or image. Other threads can only mark a request to end; the engine ends it
between two steps. This module does not use step plans or event streams.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from bridle.engine.control.vector_scales import VectorScales
from bridle.engine.input_processor import InputProcessor
from bridle.engine.interfaces import VectorStore
from bridle.engine.multimodal.encoder_scheduler import EncoderScheduler
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.request import Request
from bridle.engine.sampling.sample_planner import Outputs
from bridle.engine.scheduling.lora_scheduler import LoRAScheduler
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import SequenceStatus
from bridle.errors import BridleError, DeadlineExceeded, InvalidRequest
from bridle.outputs import Finished, FinishReason
from bridle.sampling import SamplingParams
from bridle.sampling_values import split_probe

#: How many entries of finished requests may be kept beyond the number of live ones before they are removed.
_MAX_STALE = 64


@dataclass(eq=False, repr=False)
class ActiveRequests:
    """Active requests. `outputs` has the outputs of each request, by request id. `progress` makes all changes to
    outputs; `ids` numbers new sequences."""

    _intake: InputProcessor
    _progress: OutputProcessor
    _rotation: LoRAScheduler
    _media: EncoderScheduler
    _vectors: VectorStore | None = None

    def __post_init__(self) -> None:
        self.outputs: dict[str, Outputs] = {}
        self.ids = count()
        self._deadlines = Deadlines()
        self._cancelled: list[str] = []

    def open(self, request: Request) -> Sequence:
        """Add a request and return its first sequence. Raises `InvalidRequest` if the id is already used, and
        `UnknownAdapter` for an unknown adapter."""
        if request.id in self.outputs:
            raise InvalidRequest(f"a request with id {request.id!r} is running already; choose another id", "id")
        vectors = None
        if self._vectors is not None and (request.sampling.control_vectors or request.sampling.probes):
            names = vector_names(request.sampling)
            vectors = VectorScales.of(self._vectors.open(names), request.sampling.control_vectors)
        if request.adapter is not None:
            self._open_adapter(request.adapter, vectors)
        if request.media:
            self._media.open(request)
        while request.id in self._cancelled:  # the cancellation was meant for an earlier request with that id
            self._cancelled.remove(request.id)
        if request.deadline is not None:
            self._deadlines.add(request.id, request.deadline)
        seq = self._intake.new_sequence(request, next(self.ids))
        seq.vectors = vectors
        if request.sampling.probes and vectors is not None and request.controller is not None:
            seq.probes = tuple((vectors.keys[name], at) for name, at in map(split_probe, request.sampling.probes))
        self.outputs[request.id] = Outputs({seq.id: seq})
        return seq

    def _open_adapter(self, adapter: str, vectors: VectorScales | None) -> None:
        try:
            self._rotation.open(adapter)
        except BridleError:
            self._leave_vectors(vectors)
            raise

    def _leave_vectors(self, vectors: VectorScales | None) -> None:
        if vectors is not None and self._vectors is not None:
            self._vectors.leave(vectors.keys.values())

    def end(self, seq: Sequence, event: Finished) -> None:
        """End an output with an event. The request ends with its last output."""
        request, outputs = seq.request, self.outputs[seq.request.id]
        outputs.sequences.pop(seq.id)
        is_last = not outputs.sequences
        if is_last:
            del self.outputs[request.id]
            if request.deadline is not None:
                self._deadlines.drop(request.id)
            if request.adapter is not None:
                self._rotation.leave(request.adapter)
            if request.media:
                self._media.leave(request)
            if seq.vectors is not None:
                self._leave_vectors(seq.vectors)
        event = replace(event, is_last=is_last)
        if seq.trace is not None:
            self._progress.tracer.end(seq, event)
        self._progress.events.append(event)

    def cancel_nowait(self, request_id: str) -> None:
        """Mark a request to end when `apply` is called next; unknown ids are ignored. Safe from any thread."""
        self._cancelled.append(request_id)

    def apply(self, now: float) -> None:
        """End the requests that missed their deadline before `now`, were cancelled, or lost their adapter or image."""
        while self._cancelled:
            for seq in self._sequences_of(self._cancelled.pop()):
                self._progress.finish(seq, FinishReason.CANCELLED)
        for request_id, late in self._deadlines.pop_due(now) if self._deadlines.heap else ():
            for seq in self._sequences_of(request_id):
                self._progress.finish(seq, FinishReason.DEADLINE, error=_too_late(seq, late))
        if failures := self._rotation.take_failures():
            self._fail_users(failures, lambda seq: (seq.request.adapter,))
        if self._media.num_users and (refused := self._media.take_failures()):
            self._fail_users(refused, lambda seq: [run.key for run in seq.runs])

    def blocks_by_tenant(self) -> Counter[str]:
        """Return the number of KV blocks that the active requests of each tenant use. A block that several outputs of a
        tenant share counts once. Safe from any thread."""
        held: dict[str, set[int]] = {}
        for outputs in list(self.outputs.values()):
            for seq in list(outputs.sequences.values()):
                held.setdefault(seq.request.tenant, set()).update(seq.kv.block_table)
        return Counter({tenant: len(blocks) for tenant, blocks in held.items()})

    def _fail_users(self, failures: Mapping[Any, BridleError], needs: Callable[[Sequence], Iterable[object]]) -> None:
        for request_id in tuple(self.outputs):
            for seq in self._sequences_of(request_id):
                errors = [failures[key] for key in needs(seq) if key in failures]
                if errors:
                    self._progress.fail(seq, errors[0])

    def _sequences_of(self, request_id: str) -> list[Sequence]:
        outputs = self.outputs.get(request_id)
        return list(outputs.sequences.values()) if outputs else []


def _too_late(seq: Sequence, late: float) -> DeadlineExceeded:
    """Return the error for a missed deadline. The message says how many tokens the output had, so that the client can
    adapt its request."""
    if seq.queue.status is SequenceStatus.OPENING:
        state = "while its controller was being made"
    elif seq.queue.status is SequenceStatus.WAITING and not seq.num_generated:
        state = "while it waited for room"
    else:
        state = f"after {seq.num_generated} tokens of output"
    return DeadlineExceeded(f"the request's deadline passed {late:.3f} s ago, {state}")


class Deadlines:
    """Deadlines by request. Only one thread may use this object at a time. All times must come from the same clock."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self.heap: list[tuple[float, str]] = []  # entries of ended requests are removed later

    def __len__(self) -> int:
        return len(self.heap)

    def add(self, request_id: str, deadline: float) -> None:
        """Add a request that must end at the time `deadline`."""
        self._due[request_id] = deadline
        heapq.heappush(self.heap, (deadline, request_id))
        if len(self.heap) > 2 * len(self._due) + _MAX_STALE:
            self.heap = [(due, known) for known, due in self._due.items()]
            heapq.heapify(self.heap)

    def drop(self, request_id: str) -> None:
        """Remove a request that has ended; unknown ids are ignored."""
        self._due.pop(request_id, None)

    def pop_due(self, now: float) -> Iterator[tuple[str, float]]:
        """Yield each request whose deadline has passed, once, with the seconds by which it is late."""
        while self.heap and self.heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self.heap)
            if self._due.get(request_id) == deadline:
                del self._due[request_id]
                yield request_id, now - deadline


def vector_names(sampling: SamplingParams) -> list[str]:
    """Return the names of the control vectors that a request scales or names in `probes`."""
    return list(dict.fromkeys((*sampling.control_vectors, *(split_probe(probe)[0] for probe in sampling.probes))))
