"""Ends requests before their outputs are complete: cancelled, too late, or without the adapter or the picture
that they need.

Endings that other threads ask for are applied between two steps. This module knows nothing of plans, nor whether
anybody still reads the events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping

from bridle.engine.branching import Outputs
from bridle.engine.progress import Progress
from bridle.engine.request import Request
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import SequenceStatus
from bridle.errors import BridleError, DeadlineExceeded
from bridle.outputs import FinishReason

#: How many entries of finished requests may be kept beyond the number of live ones before they are removed.
_MAX_STALE = 64


class Endings:
    """Ends requests of `live`. `take_failures` gives the adapters that cannot be loaded, with the reasons, and
    `take_media_failures` the pictures that cannot be encoded."""

    def __init__(
        self,
        live: Mapping[str, Outputs],
        progress: Progress,
        take_failures: Callable[[], Mapping[str, BridleError]],
        take_media_failures: Callable[[], Mapping[bytes, BridleError]] = dict,
    ) -> None:
        self._live = live
        self._progress = progress
        self._take_failures = take_failures
        self._take_media_failures = take_media_failures
        self._deadlines = Deadlines()
        self._cancelled: list[str] = []

    def watch(self, request: Request) -> None:
        """Watch a request that begins."""
        while request.id in self._cancelled:  # it was meant for an earlier request with that id
            self._cancelled.remove(request.id)
        if request.deadline is not None:
            self._deadlines.add(request.id, request.deadline)

    def forget(self, request_id: str) -> None:
        """Stop watching a request with a deadline, which is over."""
        self._deadlines.drop(request_id)

    def cancel_nowait(self, request_id: str) -> None:
        """End a request when `apply` is called next; unknown ids are ignored. Safe from any thread."""
        self._cancelled.append(request_id)

    def apply(self, now: float) -> None:
        """End the requests whose time has come by `now`, that were cancelled, or whose adapter or picture failed."""
        while self._cancelled:
            for seq in self._sequences_of(self._cancelled.pop()):
                self._progress.finish(seq, FinishReason.CANCELLED)
        for request_id, late in self._deadlines.pop_due(now):
            for seq in self._sequences_of(request_id):
                self._progress.finish(seq, FinishReason.DEADLINE, error=_too_late(seq, late))
        for key, error in self._take_failures().items():
            for request_id in tuple(self._live):
                for seq in self._sequences_of(request_id):
                    if seq.request.adapter == key:
                        self._progress.fail(seq, error)
        for medium, error in self._take_media_failures().items():
            for request_id in tuple(self._live):
                for seq in self._sequences_of(request_id):
                    if any(run.key == medium for run in seq.runs):
                        self._progress.fail(seq, error)

    def _sequences_of(self, request_id: str) -> list[Sequence]:
        outputs = self._live.get(request_id)
        return list(outputs.sequences.values()) if outputs else []


def _too_late(seq: Sequence, late: float) -> DeadlineExceeded:
    """The error for a missed deadline. It says how far the output had come, so that its client knows what to change."""
    if seq.queue.status is SequenceStatus.OPENING:
        state = "while its controller was being made"
    elif seq.queue.status is SequenceStatus.WAITING and not seq.num_generated:
        state = "while it waited for room"
    else:
        state = f"after {seq.num_generated} tokens of output"
    return DeadlineExceeded(f"the request's deadline passed {late:.3f} s ago, {state}")


class Deadlines:
    """Deadlines by request. One thread at a time; times are of one clock."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # may also name requests that are over; they are removed now and then

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request_id: str, deadline: float) -> None:
        """Add a request that must end at `deadline`."""
        self._due[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * len(self._due) + _MAX_STALE:
            self._heap = [(due, known) for known, due in self._due.items()]
            heapq.heapify(self._heap)

    def drop(self, request_id: str) -> None:
        """Remove a request that is over; unknown ids are ignored."""
        self._due.pop(request_id, None)

    def pop_due(self, now: float) -> Iterator[tuple[str, float]]:
        """The requests whose deadline has passed, each once, with how late it is in seconds."""
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            if self._due.get(request_id) == deadline:
                del self._due[request_id]
                yield request_id, now - deadline
