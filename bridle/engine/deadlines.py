"""When requests are to end: the earliest first, however many there are and whichever are over before their time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

#: Entries of requests that are over, before they are swept out beside as many live ones.
_MAX_STALE = 64


class Deadlines:
    """Deadlines by request. One thread at a time; times are of one clock."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # also of requests that are over: swept out now and then

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request_id: str, deadline: float) -> None:
        """The request is to end at `deadline`."""
        self._due[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * len(self._due) + _MAX_STALE:
            self._heap = [(due, known) for known, due in self._due.items()]
            heapq.heapify(self._heap)

    def drop(self, request_id: str) -> None:
        """The request is over; unknown ids are ignored."""
        self._due.pop(request_id, None)

    def pop_due(self, now: float) -> Iterator[tuple[str, float]]:
        """Requests whose time is up, each once, with how late it is."""
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            if self._due.get(request_id) == deadline:
                del self._due[request_id]
                yield request_id, now - deadline
