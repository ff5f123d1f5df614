"""Running requests of this process: one streamed request, or a batch of which a limited number run at once.

    with run(model.client, request) as running:
        for events in running:
            ...
    running.output

Code that has loaded a model reads its results here: `LLM`, the command line, and replays. In a server, clients can
disconnect and tickets must be released; there, `generation.py` reads the results of a call. An output that failed has
an error; `raise_first_error` raises this error.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from bridle.errors import Overloaded
from bridle.outputs import Event, RequestOutput
from bridle.serving.outputs.output_collector import OutputCollector, collect

if TYPE_CHECKING:
    from bridle.engine.client import EngineClient, EventStream
    from bridle.engine.request import Request
    from bridle.serving.lifecycle.request_record import RequestRecord

Report = Callable[[RequestOutput], None]

MAX_IN_FLIGHT = 1024
RETRY_SECONDS = 0.05


class RequestHandle:
    """A submitted request, its output so far, and its record, if a record was requested."""

    def __init__(self, stream: EventStream, collector: OutputCollector, story: RequestRecord | None = None) -> None:
        self.stream = stream
        self.collector = collector
        self.story = story

    def __del__(self) -> None:
        self.stream.cancel()  # may run in any thread at any moment; takes no lock

    @property
    def output(self) -> RequestOutput:
        """Return the output so far, which must not be modified. The output is complete when all events have been
        read."""
        return self.collector.output

    def add(self, events: Iterable[Event]) -> None:
        """Add events of the stream to the output."""
        self.collector.add(events)
        if self.story is not None:
            self.story.record_events(events)

    def __iter__(self) -> Iterator[list[Event]]:
        """Yield the events that were not read yet. Each list of events is added to the output before it is yielded.
        Leaving the iteration early cancels the request."""
        for events in self.stream:
            self.add(events)
            yield events

    def read(self) -> RequestOutput:
        """Wait for the end of the request. Returns the whole output."""
        for _ in self:
            pass
        return self.output

    def cancel(self) -> None:
        """Cancel the request, unless it has ended. Safe from any thread."""
        self.stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


def run(
    client: EngineClient, request: Request, text: str | None = None, story: RequestRecord | None = None
) -> RequestHandle:
    """Submit a request; `text` is the text of its prompt. Raises the same errors as `client.submit`."""
    if story is not None:
        story.submit(request)
    stream = client.submit(request)
    if story is not None:
        story.streams.append(stream)
    return RequestHandle(stream, OutputCollector(request, text), story)


# -- batches of requests -------------------------------------------------------------------------------------


async def run_batch(client: EngineClient, collectors: Sequence[OutputCollector], report: Report) -> None:
    """Run the request of each collector to its end. `report` is called with each output when it is complete.

    If one request is refused, the other requests are cancelled and the error is raised. Cancelling this call cancels
    all requests.
    """
    waiting = deque(collectors)
    started = _start(client, waiting)
    lanes = [asyncio.ensure_future(_lane(client, stream, collector, waiting, report)) for stream, collector in started]
    try:
        await asyncio.gather(*lanes)
    finally:
        for lane, (stream, _) in zip(lanes, started, strict=True):
            lane.cancel()
            stream.cancel()  # a lane that is cancelled before it begins cannot do this
        await asyncio.gather(*lanes, return_exceptions=True)


def _start(client: EngineClient, waiting: deque[OutputCollector]) -> list[tuple[EventStream, OutputCollector]]:
    """Submit as many requests as may run at once. If one request is refused, all other requests are cancelled."""
    started: list[tuple[EventStream, OutputCollector]] = []
    try:
        while waiting and len(started) < MAX_IN_FLIGHT:
            started.append((client.submit(waiting[0].request), waiting[0]))
            waiting.popleft()
    except Overloaded:
        if not started:
            raise
    except BaseException:
        for stream, _ in started:
            stream.cancel()
        raise
    return started


async def _lane(
    client: EngineClient,
    stream: EventStream,
    collector: OutputCollector,
    waiting: deque[OutputCollector],
    report: Report,
) -> None:
    """Read one request after the other, and submit waiting requests meanwhile."""
    while True:
        report(await collect(stream, collector))
        if not waiting:
            return
        collector = waiting.popleft()
        stream = await _submit(client, collector)


async def _submit(client: EngineClient, collector: OutputCollector) -> EventStream:
    """Submit a request when there is room. The wait is necessary because other callers may fill the engine's queue."""
    while True:
        try:
            return client.submit(collector.request)
        except Overloaded:
            await asyncio.sleep(RETRY_SECONDS)
