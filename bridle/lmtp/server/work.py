"""The work behind a stream: get the model, build and admit a request, and pass on the engine's events as answers.

However the work fails, the stream gets exactly one last answer, and everything that was reserved is given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog

from bridle.engine.request import Request
from bridle.errors import BridleError, InternalError, InvalidRequest
from bridle.lmtp.failures import failure_of
from bridle.lmtp.messages import Event, Generate, Score
from bridle.lmtp.server.buffers import Buffer
from bridle.lmtp.server.info import served_name
from bridle.lmtp.server.relay import Relay
from bridle.lmtp.server.requests import generate_request, score_request, wants_text
from bridle.lmtp.server.settings import LmtpSettings
from bridle.lmtp.server.telling import GenerateTeller, ScoreTeller, Teller, Telling
from bridle.outputs import Event as EngineEvent
from bridle.outputs import Finished, FinishReason, PromptEvent, Rewind, TokenEvent, Usage
from bridle.service import Admission, LoadedModel, ModelRegistry, ModelState, Ticket, new_request_id
from bridle.service.keys import Identity
from bridle.service.story import Story, Tracing
from bridle.service.terms import make_terms

#: A request that has not begun after this many seconds is reported as queued.
_LONG_WAIT = 0.2
_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.lmtp")


class Host(Protocol):
    """The service around the streams: models, admission, and whether new requests are accepted at all."""

    @property
    def registry(self) -> ModelRegistry:
        raise NotImplementedError

    @property
    def admission(self) -> Admission:
        raise NotImplementedError

    @property
    def live(self) -> dict[str, Story]:
        """The requests that a model works on, by id."""
        raise NotImplementedError

    @property
    def tracing(self) -> Tracing | None:
        """Makes and sends the spans of requests, if there is tracing."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Raises `EngineClosed` while the server is shutting down."""

    def note_end(self) -> None:
        """Note that a request is over, and that what it had reserved is free again."""


@dataclass(slots=True)
class Work:
    """One GENERATE or SCORE, with the prefix before its prompt and the buffer that will hold its context. `is_extended`
    says whether its client knows the extensions, `trace` names the trace that it belongs to."""

    host: Host
    settings: LmtpSettings
    identity: Identity
    relay: Relay
    asked: Generate | Score
    is_extended: bool
    prefix: Buffer | None = None
    save: Buffer | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    story: Story = field(init=False)

    def __post_init__(self) -> None:
        kind = type(self.asked).__name__.upper()
        self.story = Story(id=new_request_id(), route=f"LMTP {kind}", identity=self.identity)

    async def run(self) -> None:
        """Do all of the work. Errors become answers; a cancelled task only gives back what it holds."""
        story = self.story
        if self.host.tracing is not None:
            story.span = self.host.tracing.begin(self.trace)
        self.host.live[story.id] = story
        try:
            with ExitStack() as held:
                held.callback(self.host.note_end)
                await self._run(held)
        except asyncio.CancelledError:
            story.finish.append(FinishReason.CANCELLED.value)
            raise
        except BridleError as error:
            story.error = error
            self.relay.put(failure_of(self.asked.stream_id, error))
        except Exception:
            story.error = InternalError("see the log")
            _log.exception("bug", stream=self.asked.stream_id)
            self.relay.put(failure_of(self.asked.stream_id, story.error))
        finally:
            if self.save is not None:
                self.save.fail(InvalidRequest(f"buffer {self.save.name!r} was not filled: its stream failed", "buffer"))
            self.relay.end()
            del self.host.live[story.id]
            self._tell(story)

    def _tell(self, story: Story) -> None:
        """Write the log line of the request, and end its span."""
        _log.info("request", id=story.id, route=story.route, stream=self.asked.stream_id, **story.fields())
        if story.span is not None:
            story.span.end(story, "text_completion", {"network.protocol.name": "lmtp"})

    async def _run(self, held: ExitStack) -> None:
        self.host.check_open()
        identity, story = self.identity, self.story
        story.terms = make_terms(self.asked.priority, self.asked.deadline, identity, story.began)
        ticket = held.enter_context(self.host.admission.admit(1, identity.user, identity.limits))
        async with story.terms.bounded("its model was loaded"):
            model, adapter = await self._acquire(held)
        story.model, story.adapter = model.name, adapter
        prefix = await self.prefix.tokens() if self.prefix is not None else ()
        timeout = self.settings.request_timeout
        teller: Teller
        if isinstance(self.asked, Score):
            request, num_scored = await score_request(
                model, self.asked, prefix, identity, timeout, adapter, story.terms
            )
            teller = ScoreTeller(self.asked.stream_id, num_scored)
        else:
            request = await generate_request(model, self.asked, prefix, identity, timeout, adapter, story.terms)
            teller = GenerateTeller(self._telling(model, self.asked), request)
        story.submit(request)
        await self._read(model, ticket, ticket.seat(replace(request, metadata=story.metadata)), teller)

    async def _acquire(self, held: ExitStack) -> tuple[LoadedModel, str | None]:
        """Get the model and the adapter that the request names. The client is told if it has to wait for
        one of them."""
        registry, timeout = self.host.registry, self.settings.load_timeout
        chosen = registry.choose(served_name(registry, self.asked.model), self.asked.adapter)
        is_loaded = registry.state_of(chosen.model) is ModelState.LOADED
        if not is_loaded:
            self._say("loading", model=self.asked.model)
        model = held.enter_context(await registry.acquire(chosen.model, timeout))
        is_ready = registry.adapters.is_ready(model, chosen.adapter)
        if is_loaded and not is_ready:
            self._say("loading", adapter=chosen.adapter)
        adapter = await registry.adapters.fetch(model, chosen.adapter, timeout)
        if not is_loaded:
            self._say("loaded", model=self.asked.model)
        elif not is_ready:
            self._say("loaded", adapter=adapter)
        return model, adapter

    def _telling(self, model: LoadedModel, asked: Generate) -> Telling:
        eos = model.info.eos_token_ids
        return Telling(
            asked.stream_id, eos[0] if eos else 0, wants_text(asked), self.is_extended, asked.rewind == "event"
        )

    async def _read(self, model: LoadedModel, ticket: Ticket, request: Request, teller: Teller) -> None:
        """Submit the request and pass on its events until the stream is over. Leaving early cancels the request."""
        context = _Context()
        async with model.client.submit(request) as stream:
            notice = asyncio.get_running_loop().call_later(_LONG_WAIT, self._tell_wait, model)
            try:
                async for events in stream:
                    notice.cancel()
                    ticket.note(events)
                    self._note(events)
                    if self.save is not None:
                        context.add(events)
                    for answer in teller.tell(events):
                        self.relay.put(answer)
                    if teller.is_over:
                        break
                    await self.relay.room()
            except BridleError as error:  # the engine is gone, or a controller broke a promise
                for answer in teller.fail(error):
                    self.relay.put(answer)
            finally:
                notice.cancel()
        if self.save is not None and not teller.has_failed:
            self.save.fill(tuple(context.tokens))

    def _note(self, events: list[EngineEvent]) -> None:
        story = self.story
        story.note(events)
        for event in events:
            if isinstance(event, Finished):
                story.usage = story.usage or Usage()
                story.usage.add(event.usage)
                story.finish.append(event.reason.value)
                story.error = story.error or event.error

    def _tell_wait(self, model: LoadedModel) -> None:
        self._say("queued", num_waiting=model.client.statistics().num_waiting)

    def _say(self, event: str, **data: Any) -> None:
        """Send a notice to a client that knows the extensions."""
        if self.is_extended:
            self.relay.put(Event(event=event, stream_id=self.asked.stream_id, data=data))


@dataclass(slots=True)
class _Context:
    """The prompt and the first output of a request, in their final form."""

    tokens: list[int] = field(default_factory=list)

    def add(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            match event:
                case PromptEvent():
                    self.tokens[:0] = event.tokens
                case TokenEvent() if event.index == 0:
                    self.tokens.append(event.token)
                case Rewind() if event.index == 0 and event.num_tokens:
                    del self.tokens[-event.num_tokens :]
