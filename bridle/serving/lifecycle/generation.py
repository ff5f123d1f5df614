"""The engine requests of one client call, and their results.

Each prompt of a call becomes one engine request. With a controller, each choice becomes a separate request, so that
each has its own controller instance and variables. The other choices begin when the first choice has computed the
common prompt. All requests are checked before the first one is submitted, and all end with the call. Front ends pass an
object that receives the results (`Sink`), so this module uses no wire format.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bridle.controllers.composition import user_controllers
from bridle.controllers.reasoning_gate import ReasoningThenGrammar
from bridle.engine.client import EventStream
from bridle.engine.request import Request
from bridle.errors import BridleError, DeadlineExceeded, EngineClosed, InternalError
from bridle.outputs import CompletionOutput, Event, Finished, FinishReason, RequestOutput, Resuming, Traced, Usage
from bridle.serving.lifecycle.live_text import LiveReader, LiveText
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.models.loading import LoadedModel
from bridle.serving.outputs.output_collector import OutputCollector, with_logs
from bridle.serving.outputs.stream_deltas import Delta, DeltaReader, RewindPolicy, split_at_rewinds
from bridle.serving.outputs.stream_extras import StreamExtras, StreamExtrasReader
from bridle.serving.tenancy.admission import Ticket
from bridle.structured_output import Constraint


@dataclass(slots=True)
class SubRequest:
    """One prompt of a call, or one choice for a prompt, with its result. `shares` is the part with the same prompt that
    is computed first."""

    number: int
    request: Request
    policy: RewindPolicy = RewindPolicy.HOLD
    text: str | None = None
    shares: SubRequest | None = None
    tells_trace: bool = False
    is_computed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    collector: OutputCollector = field(init=False)
    outputs: list[CompletionOutput] = field(init=False)  # so far, by index; read-only
    is_steered: bool = field(init=False)
    ahead: _Ahead | None = field(init=False, default=None)
    stream: EventStream | None = field(init=False, default=None)
    _reader: DeltaReader | None = field(init=False, default=None)
    notes: StreamExtrasReader | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.collector = OutputCollector(self.request, self.text)
        self.outputs = self.collector.output.outputs
        # Whether a controller steers the request, which may fork, log, and rewrite the prompt. A constraint, which only
        # restricts the text, does not count.
        controller = None if self.request.controller is None else user_controllers(self.request.controller)
        self.is_steered = controller is not None and not isinstance(controller, (Constraint, ReasoningThenGrammar))

    @property
    def reader(self) -> DeltaReader:
        """Return the reader, shared by all callers, of the visible part of all outputs."""
        if self._reader is None:
            self._reader = DeltaReader(self.collector, self.policy)
        return self._reader

    @property
    def is_plain(self) -> bool:
        """Return whether text may be sent at once. The request must have only one output, all of whose text is visible,
        and no extras."""
        has_notes = self.notes is not None and bool(self.notes.indexes)
        return len(self.outputs) == 1 and self.reader.shows_all and not has_notes

    def add(self, events: list[Event]) -> None:
        """Add events of the engine to the result."""
        self.collector.add(events)
        if self.is_steered or self.request.tell_resuming or self.tells_trace:
            self.notes = self.notes or StreamExtrasReader(tells_trace=self.tells_trace)
            kinds = (Resuming, Traced)
            self.notes.add(events if self.is_steered else [each for each in events if isinstance(each, kinds)])

    def note(self, index: int) -> StreamExtras | None:
        """Return the new extras (logs, variables, forks) of an output."""
        return None if self.notes is None else self.notes.read(index)

    def note_fields(self, index: int) -> dict[str, Any]:
        """Return the new extras of an output as fields of an answer. Empty fields are left out."""
        note = self.note(index)
        return {} if note is None else note.fields()

    def trace_fields(self, index: int) -> dict[str, Any]:
        """Return the new trace records of an output as a field; empty if there are none."""
        told = [] if self.notes is None else self.notes.read_records(index)
        return {"trace": told} if told else {}

    def read_notes(self) -> list[tuple[int, StreamExtras]]:
        """Return the new extras of all outputs."""
        notes = self.notes
        return [] if notes is None else [(index, notes.read(index)) for index in sorted(notes.indexes)]

    def read(self) -> list[tuple[Delta, StreamExtras | None]]:
        """Return the text and the extras of each output that are new since the last call."""
        deltas = {delta.index: delta for delta in self.reader.read()}
        for index in () if self.notes is None else self.notes.indexes:
            deltas.setdefault(index, Delta(index))
        return [(deltas[index], self.note(index)) for index in sorted(deltas)]


#: Called with a part after each batch of its events. Returns True to stop reading. A returned `LiveText` sends the next
#: tokens if the part `is_plain`.
Sink = Callable[[SubRequest, list[Event]], Awaitable[bool | LiveText | None]]


@dataclass(slots=True)
class Generation:
    """The parts of a call (its prompts and choices), ready to run. At most `at_once` parts of a call run at the same
    time (None: all parts). `served_name` is the name of the model or the adapter. `held` has the resources of the whole
    call, such as the lease on the model. `keep` is called with the outputs of a traced call."""

    model: LoadedModel
    served_name: str
    story: RequestRecord
    ticket: Ticket
    held: ExitStack
    parts: list[SubRequest]
    at_once: int | None = None
    keep: Callable[[list[RequestOutput]], None] | None = None

    async def begin(self) -> list[Event]:
        """Submit the only part of a call and wait for its first events, for callers that need these events before the
        answer begins. `run` then begins with the events that were read."""
        (part,) = self.parts
        part.ahead = _Ahead(self._submit(part))
        self.held.callback(part.ahead.cancel)
        return await part.ahead.look()

    async def run(self, sink: Sink | None = None, *, tells_failures: bool = False) -> None:
        """Submit every part of the call, and read all parts to their end.

        Raises the first error of any output, unless `sink` reports errors itself (`tells_failures`). In any case, all
        requests end, and the record and the ticket get the usage.
        """
        num_prompt = sum(len(part.request.prompt) for part in self.parts if part.shares is None)
        self.story.submit(self.parts[0].request, num_prompt)
        try:
            if len(self.parts) == 1:
                await self._read(self.parts[0], sink, tells_failures)
                return
            room = asyncio.Semaphore(self.at_once or len(self.parts))
            async with asyncio.TaskGroup() as group:
                for part in self.parts:
                    group.create_task(self._read_in_turn(part, room, sink, tells_failures))
        except BaseExceptionGroup as group:  # `except*` would wrap an error raised in it, on some versions
            raise _first(group) from None
        finally:
            self._settle()

    async def _read_in_turn(
        self, part: SubRequest, room: asyncio.Semaphore, sink: Sink | None, tells_failures: bool
    ) -> None:
        """Run a part of the call when `room` is free and the part in `shares` has computed the common prompt."""
        if part.shares is not None:
            await part.shares.is_computed.wait()
        try:
            async with room:
                await self._read(part, sink, tells_failures)
        finally:
            part.is_computed.set()

    async def _read(self, part: SubRequest, sink: Sink | None, tells_failures: bool) -> None:
        """Submit a part of the call and read it to its end."""
        stream, live = part.ahead or self._submit(part), None
        try:
            async for events in stream:
                if live is not None:
                    live.settle()
                if live is not None and not events:
                    await live.drain()
                else:
                    await self.model.pace.wait()
                    found = await self._take(part, events, sink, tells_failures)
                    if found is True:
                        return
                    live = LiveReader(part, self.story, found) if found else None
                if part.stream is not None:
                    part.stream.listener = live
        finally:
            if live is not None:
                live.settle()
            stream.cancel()

    async def _take(
        self, part: SubRequest, events: list[Event], sink: Sink | None, tells_failures: bool
    ) -> bool | LiveText | None:
        """Add events to a part of the call, and pass the part to `sink`. Returns what `sink` answered last."""
        found: bool | LiveText | None = None
        # A client that gets rewinds is shown events one by one, so that its text does not depend on how events were
        # batched.
        for piece in split_at_rewinds(events) if part.policy is RewindPolicy.MARK else [events]:
            part.add(piece)
            self.story.record_events(piece)
            if part.collector.has_prompt:
                part.is_computed.set()
            for event in () if tells_failures else piece:
                if isinstance(event, Finished) and (error := error_of(event)) is not None:
                    raise with_logs(error, part.collector.growing[event.index].output)
            if sink is not None and (found := await sink(part, piece)) is True:
                break
        return found

    def _submit(self, part: SubRequest) -> EventStream:
        part.stream = self.model.client.submit(part.request)
        if part.shares is None:  # a shared prompt is counted once
            self.story.streams.append(part.stream)
        return part.stream

    @property
    def usage(self) -> Usage:
        """Return the usage counts of all parts together. For cancelled outputs, the counts that are known so far are
        used."""
        total = Usage()
        for part in self.parts:
            usage = part.collector.output.usage
            usage.prompt_tokens = usage.prompt_tokens or len(part.collector.output.prompt_token_ids)
            if usage.cached_tokens == 0 and part.stream is not None and part.stream.prompt is not None:
                usage.cached_tokens = part.stream.prompt.num_cached
            if part.shares is not None:  # a shared prompt is counted once
                usage.prompt_tokens = usage.cached_tokens = 0
            broken = (output for output in part.outputs if output.finish_reason is None)
            usage.completion_tokens += sum(len(output.token_ids) for output in broken)
            total.add(usage)
        return total

    def _settle(self) -> None:
        """Record the usage of the call, including rolled-back outputs, and the finish reasons of the call."""
        if self.keep is not None:
            self.keep([part.collector.output for part in self.parts])
        story, outputs = self.story, [output for part in self.parts for output in part.outputs]
        story.usage = self.usage
        story.finish = [(output.finish_reason or FinishReason.CANCELLED).value for output in outputs]
        story.error = story.error or next((output.error for output in outputs if output.error is not None), None)
        self.ticket.num_output = story.usage.completion_tokens + story.usage.rewound_tokens


class _Ahead:
    """A stream whose first events were read in advance and are returned again."""

    def __init__(self, stream: EventStream) -> None:
        self._batches = aiter(stream)
        self._first: list[Event] = []
        self.cancel = stream.cancel

    async def look(self) -> list[Event]:
        self._first = await anext(self._batches)
        return self._first

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        yield self._first
        async for events in self._batches:
            yield events


def error_of(event: Finished) -> BridleError | None:
    """Return the error with which an output ended; None if it ended normally."""
    if event.error is not None:
        return event.error
    match event.reason:
        case FinishReason.DEADLINE:
            return DeadlineExceeded("the request did not finish within the server's time limit")
        case FinishReason.CANCELLED:
            return EngineClosed("the request was cancelled by the server")
        case FinishReason.ERROR:
            return InternalError("the output ended in an error that was not named")
        case _:
            return None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of an exception group. An exception that is not a `BridleError` comes first."""
    errors = [_first(each) if isinstance(each, BaseExceptionGroup) else each for each in group.exceptions]
    return next((error for error in errors if not isinstance(error, BridleError)), errors[0])
