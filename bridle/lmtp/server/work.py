"""The work behind a stream: the model is had, a request built and admitted, and the engine's events told.

Whatever goes wrong, on whatever way, the stream is told once, and everything taken is given back.
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

#: A request that has not begun after so many seconds is said to be queued.
_LONG_WAIT = 0.2
_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.lmtp")


class Host(Protocol):
    """The service around the streams: models, room, and whether new requests are taken at all."""

    @property
    def registry(self) -> ModelRegistry:
        raise NotImplementedError

    @property
    def admission(self) -> Admission:
        raise NotImplementedError

    @property
    def live(self) -> dict[str, Story]:
        """Requests that a model works on, by id."""
        raise NotImplementedError

    @property
    def tracing(self) -> Tracing | None:
        """Where the spans of requests go, if anywhere."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Raises `EngineClosed` while the server is shutting down."""

    def note_end(self) -> None:
        """A request is over, and what it had reserved is free again."""


@dataclass(slots=True)
class Work:
    """One GENERATE or SCORE: what comes before its prompt, and what its context is to be kept as. `is_extended` says
    whether its client knows the extensions, `trace` which trace it belongs to."""

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
        """Do it all. Errors become answers; a cancelled task just lets go of everything."""
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
        """One line that tells what happened, and the end of the span."""
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
        """The model and the adapter that are asked for; the client hears if it has to wait for one of them."""
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
        """Submit the request and tell its events until the stream is over. Leaving early ends the request."""
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
            except BridleError as error:  # the engine is gone, or a controller broke its word
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
        """A notice, to those who know what one is."""
        if self.is_extended:
            self.relay.put(Event(event=event, stream_id=self.asked.stream_id, data=data))


@dataclass(slots=True)
class _Context:
    """Prompt and first output of a request, as they are in the end."""

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
