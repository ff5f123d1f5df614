"""From prompts to outputs: the engine requests behind one HTTP call.

One call may hold several prompts; each becomes an engine request of its own. With a controller each choice becomes one,
too, so that each has an instance and variables of its own; the others begin when the first has computed the prompt that
they share. All requests are checked before the first is submitted, and all end when the call does. This module knows no
wire format: the routes pass in a sink.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bridle.constraints import Constraint
from bridle.controllers.free_part import FreePart
from bridle.engine.request import Request
from bridle.errors import BridleError, ControllerError, DeadlineExceeded, EngineClosed, InternalError, InvalidRequest
from bridle.http.control import Steering
from bridle.http.notes import Note, NoteReader
from bridle.http.state import HttpState
from bridle.http.transport.call import Call
from bridle.http.transport.identity import LOCAL_USER
from bridle.http.transport.waiting import wait_for
from bridle.outputs import CompletionOutput, Event, FinishReason, Resuming, Usage
from bridle.sampling import MAX_SEED, SamplingParams
from bridle.service import (
    Delta,
    DeltaReader,
    LoadedModel,
    OutputCollector,
    RewindPolicy,
    Ticket,
    build_request,
    split_at_rewinds,
)
from bridle.service.admission import max_output
from bridle.service.requests import MAX_INLINE_CHARS, tokenize_all

if TYPE_CHECKING:
    from bridle.engine.client import EventStream

Prompt = str | list[int]
_MAX_ERROR_LOG_CHARS = 4_096


@dataclass(slots=True)
class Part:
    """One prompt of a call, or one choice for a prompt, and its outputs. `shares` is the part with the same prompt that
    is computed first."""

    number: int
    prompt: Prompt
    request: Request
    policy: RewindPolicy = RewindPolicy.HOLD
    shares: Part | None = None
    is_computed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    collector: OutputCollector = field(init=False)
    reader: DeltaReader = field(init=False)
    notes: NoteReader = field(init=False, default_factory=NoteReader)

    def __post_init__(self) -> None:
        self.collector = OutputCollector(self.request, self.prompt if isinstance(self.prompt, str) else None)
        self.reader = DeltaReader(self.collector, self.policy)

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self.collector.output.outputs

    @property
    def is_steered(self) -> bool:
        """Whether a program steers it, which may fork, log, and rewrite the prompt. A constraint only says how the text
        must look, and does not count."""
        return self.request.controller is not None and not isinstance(self.request.controller, (Constraint, FreePart))

    def pieces(self, events: list[Event]) -> list[list[Event]]:
        """The events, split at the points where a reader must look."""
        return split_at_rewinds(events) if self.policy is RewindPolicy.MARK else [events]

    def add(self, events: list[Event]) -> None:
        """Add events."""
        self.collector.add(events)
        if self.is_steered:
            self.notes.add(events)
        elif self.request.tell_resuming:
            self.notes.add(event for event in events if isinstance(event, Resuming))

    def take(self) -> list[tuple[Delta, Note]]:
        """The news of each output since the last call, text and notes."""
        deltas = {delta.index: delta for delta in self.reader.take()}
        for index in self.notes.indexes:
            deltas.setdefault(index, Delta(index))
        return [(deltas[index], self.notes.take(index)) for index in sorted(deltas)]


Sink = Callable[[Part], Awaitable[None]]


@dataclass(slots=True)
class Generation:
    """The parts of a call, ready to run. `adapter` is the name of the adapter over the model."""

    model: LoadedModel
    call: Call
    parts: list[Part]
    adapter: str | None = None

    @property
    def served_name(self) -> str:
        """The name of what answers: an adapter's own name if there is one, otherwise the model's."""
        return self.adapter or self.model.name

    async def run(self, sink: Sink | None = None) -> None:
        """Submit every part and read them all to their end; `sink` gets a part after each batch of its events.

        Raises the first error of any output. On every path all requests are ended.
        """
        num_prompt = sum(len(part.request.prompt) for part in self.parts if part.shares is None)
        self.call.submit(self.parts[0].request, num_prompt)
        streams = {part.number: self._submit(part) for part in self.parts if part.shares is None}
        try:
            async with asyncio.TaskGroup() as group:
                for part in self.parts:
                    group.create_task(self._run(part, streams.get(part.number), sink))
        except BaseExceptionGroup as group:  # `except*` would wrap what is raised in it, on some versions
            raise _first(group) from None
        finally:
            self._tell()

    def _submit(self, part: Part) -> EventStream:
        stream = self.model.client.submit(part.request)
        self.call.resources.callback(stream.cancel)
        return stream

    async def _run(self, part: Part, stream: EventStream | None, sink: Sink | None) -> None:
        """Read a part to its end; it is submitted first if it had to wait."""
        if part.shares is not None:
            await part.shares.is_computed.wait()
        try:
            await self._read(part, stream or self._submit(part), sink)
        finally:
            part.is_computed.set()

    async def _read(self, part: Part, stream: EventStream, sink: Sink | None) -> None:
        async with stream:
            async for events in stream:
                for piece in part.pieces(events):
                    part.add(piece)
                    self.call.note(piece)
                    if part.collector.has_prompt:
                        part.is_computed.set()
                    _raise_failure(part, piece)
                    if sink is not None:
                        await sink(part)

    @property
    def usage(self) -> Usage:
        """Counts over all parts. Of outputs that were cancelled, the counts that are known."""
        total = Usage()
        for part in self.parts:
            usage = part.collector.output.usage
            usage.prompt_tokens = usage.prompt_tokens or len(part.collector.output.prompt_token_ids)
            if part.shares is not None:  # the prompt is counted once
                usage.prompt_tokens = usage.cached_tokens = 0
            broken = (output for output in part.outputs if output.finish_reason is None)
            usage.completion_tokens += sum(len(output.token_ids) for output in broken)
            total.add(usage)
        return total

    def _tell(self) -> None:
        self.call.usage = self.usage
        reasons = [output.finish_reason for part in self.parts for output in part.outputs]
        self.call.finish = [(reason or FinishReason.CANCELLED).value for reason in reasons]


def reserve(http: HttpState, call: Call, model: LoadedModel, num_prompts: int, n: int) -> Ticket:
    """Reserve a place for a call, which is given back when the call ends. Do this before any work is spent
    on the call."""
    http.check_open()
    call.model = model.name
    _check_counts(http, num_prompts, n)
    identity = call.identity or LOCAL_USER
    ticket = call.resources.enter_context(http.admission.admit(num_prompts, identity.user, identity.limits))
    call.resources.callback(_settle, ticket, call)
    http.live[call.id] = call
    call.resources.callback(http.live.pop, call.id, None)
    return ticket


def _settle(ticket: Ticket, call: Call) -> None:
    """Note what the call has cost before the ticket is released, including outputs that were taken back."""
    if call.usage is not None:
        ticket.num_output = call.usage.completion_tokens + call.usage.rewound_tokens


async def prepare(
    http: HttpState,
    call: Call,
    model: LoadedModel,
    ticket: Ticket,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    tenant: str = "",
    steering: Steering | None = None,
    adapter: str | None = None,
    tell_resuming: bool = False,
    apart: bool = False,
) -> Generation:
    """Check and tokenize everything; nothing is submitted yet. A rendered chat comes as tokens. Cached prompts are
    shared only within one `tenant`. `steering` is the controller or constraint of each prompt, `adapter` the adapter
    over the model. With `tell_resuming` the client is told when the device is lost. Choices are forks of one request;
    with a controller, or if they are to be `apart`, each is a request of its own, which its seed alone repeats."""
    steering = steering or Steering()
    if steering.constraint is not None:
        await wait_for(call, "its constraint was compiled", model.try_constraint(steering.constraint))
    num_copies = sampling.n if apart or steering.controller is not None else 1
    if num_copies > 1:
        sampling = sampling.with_(n=1)
    parts: list[Part] = []
    found = await tokens_of(model, call, prompts)
    for number, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        await asyncio.sleep(0)  # many prompts must not keep others waiting
        timeout = http.settings.request_timeout
        name = f"{call.id}-{number * num_copies}"
        request = build_request(
            model,
            tokens,
            sampling,
            request_id=name,
            controller=steering.controller,
            constraint=steering.constraint,
            adapter=adapter,
            timeout=timeout,
            tenant=tenant,
            terms=call.terms,
            metadata=call.metadata,
        )
        place = ticket.charge(len(tokens) * num_copies, max_output(sampling, num_copies))
        request = replace(request, place=place, tell_resuming=tell_resuming)
        first = Part(number * num_copies, prompt, request, steering.rewind)
        parts += [first, *(_choice(call, first, copy) for copy in range(1, num_copies))]
    return Generation(model, call, parts, adapter)


async def tokens_of(
    model: LoadedModel, call: Call, prompts: Sequence[Prompt], truncate: int | None = None
) -> list[tuple[int, ...]]:
    """The tokens of a call's prompts, of each the last `truncate` ones. Tokenizing long prompts stops when the client
    leaves."""
    making = tokenize_all(model, prompts, truncate)
    if sum(map(len, prompts)) <= MAX_INLINE_CHARS:
        return await making
    return await wait_for(call, "its prompts were tokenized", making)


def _choice(call: Call, first: Part, copy: int) -> Part:
    """A further choice for a prompt: a request of its own, whose seed follows the first one's."""
    number = first.number + copy
    seed = ((first.request.sampling.seed or 0) + copy) % MAX_SEED
    request = replace(first.request, id=f"{call.id}-{number}", sampling=first.request.sampling.with_(seed=seed))
    return Part(number, first.prompt, request, first.policy, shares=first)


def _check_counts(http: HttpState, num_prompts: int, n: int) -> None:
    settings = http.settings
    if num_prompts > settings.max_prompts:
        raise InvalidRequest(f"prompt has {num_prompts} prompts; at most {settings.max_prompts}", "prompt")
    if num_prompts * n > settings.max_choices:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {n} make {num_prompts * n} choices; at most {settings.max_choices}",
            "n",
        )


def _raise_failure(part: Part, events: list[Event]) -> None:
    """Raise the error of an output that just ended, if the wire has no finish reason for it."""
    for event in events:
        error = getattr(event, "error", None)
        reason = getattr(event, "reason", None)
        if isinstance(error, ControllerError):
            error.logs = part.collector.growing[event.index].output.logs[-_MAX_ERROR_LOG_CHARS:]
        if isinstance(error, BridleError):
            raise error
        if reason is FinishReason.ERROR:
            raise InternalError("the output ended in an error that was not named")
        if reason is FinishReason.DEADLINE:
            raise DeadlineExceeded("the request did not finish within the server's time limit")
        if reason is FinishReason.CANCELLED:
            raise EngineClosed("the request was cancelled by the server")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first deliberate error in a group; a bug takes precedence over it."""
    errors = [_first(each) if isinstance(each, BaseExceptionGroup) else each for each in group.exceptions]
    return next((error for error in errors if not isinstance(error, BridleError)), errors[0])
