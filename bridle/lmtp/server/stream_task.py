"""The asyncio task of a stream: acquires the model, builds and admits a request, and sends the engine's events as
answers.

If the task fails, the stream gets exactly one last answer, and all reservations are released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import structlog

from bridle.errors import BridleError, InternalError, InvalidRequest
from bridle.lmtp.failures import failure_of
from bridle.lmtp.messages import EventMessage, Generate, Score
from bridle.lmtp.server.buffers import PrefixBuffer
from bridle.lmtp.server.info import served_name
from bridle.lmtp.server.requests import generation_of, scoring_of, wants_text
from bridle.lmtp.server.response_encoder import AnswerEncoder, EncodingOptions, GenerateTeller, ScoreTeller
from bridle.lmtp.server.resumable_stream import StreamRelay
from bridle.lmtp.server.settings import LmtpSettings
from bridle.outputs import Event as EngineEvent
from bridle.outputs import FinishReason, TokenEvent
from bridle.serving import LoadedModel, new_request_id
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.lifecycle.live_text import LiveText
from bridle.serving.lifecycle.request_lifecycle import AppState, RequestLifecycle
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.tenancy.keys import Identity
from bridle.serving.tracing.trace_store import wish_of

#: The seconds after which a request that has not begun is reported as queued.
_LONG_WAIT = 0.2
_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.lmtp")


@dataclass(slots=True)
class StreamTask:
    """The task of one GENERATE or SCORE request. `prefix` is the buffer before the request's prompt, and `save` is the
    buffer that will get the context and the output. `is_extended` means that the client knows the extensions. `trace`
    has the headers that name the request's distributed trace."""

    host: AppState
    settings: LmtpSettings
    identity: Identity
    relay: StreamRelay
    request: Generate | Score
    is_extended: bool
    prefix: PrefixBuffer | None = None
    save: PrefixBuffer | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    story: RequestRecord = field(init=False)

    def __post_init__(self) -> None:
        kind = type(self.request).__name__.upper()
        self.story = RequestRecord(id=new_request_id(), route=f"LMTP {kind}", identity=self.identity)

    async def run(self) -> None:
        """Run the task. Errors become answers. A cancelled task only releases its reservations."""
        story = self.story
        if self.host.tracing is not None:
            story.span = self.host.tracing.begin(self.trace)
        try:
            with ExitStack() as held:
                held.callback(self.host.on_request_end)
                times = self.settings.load_timeout, self.settings.request_timeout
                wish = "no" if self.request.trace is None else wish_of({}, self.request.trace)
                await self._run(RequestLifecycle(self.host, story, held, *times, wish))
        except asyncio.CancelledError:
            story.finish = story.finish or [FinishReason.CANCELLED.value]
            raise
        except BridleError as error:
            story.error = error
            self.relay.put(failure_of(self.request.stream_id, error))
        except Exception:
            story.error = InternalError("see the log")
            _log.exception("bug", stream=self.request.stream_id)
            self.relay.put(failure_of(self.request.stream_id, story.error))
        finally:
            if self.save is not None:
                self.save.fail(InvalidRequest(f"buffer {self.save.name!r} was not filled: its stream failed", "buffer"))
            self.relay.end()
            self._tell(story)

    def _tell(self, story: RequestRecord) -> None:
        """Write the log line of the request, and end its span."""
        _log.info("request", id=story.id, route=story.route, stream=self.request.stream_id, **story.fields())
        if story.span is not None:
            story.span.end(story, "text_completion", {"network.protocol.name": "lmtp"})

    async def _run(self, serving: RequestLifecycle) -> None:
        request = self.request
        model = await serving.acquire_model(
            served_name(self.host.registry, request.model),
            request.adapter,
            priority=request.priority,
            deadline=request.deadline,
            notice=self._tell_load,
        )
        prefix = await self.prefix.tokens() if self.prefix is not None else ()
        teller: AnswerEncoder
        if isinstance(request, Score):
            generation, num_scored = await scoring_of(serving, request, prefix)
            teller = ScoreTeller(request.stream_id, num_scored)
        else:
            generation = await generation_of(serving, request, prefix)
            teller = GenerateTeller(self._telling(model, request), generation.parts[0].request)
        if self.story.traced is not None:
            self._tell_event("trace", id=self.story.id, trace=self.story.traced)
        await self._read(generation, teller)

    def _telling(self, model: LoadedModel, request: Generate) -> EncodingOptions:
        eos = model.info.eos_token_ids
        return EncodingOptions(
            request.stream_id, eos[0] if eos else 0, wants_text(request), self.is_extended, request.rewind == "event"
        )

    async def _read(self, generation: Generation, teller: AnswerEncoder) -> None:
        """Run the request and send its events until the stream ends. An early return ends the request."""
        notice = asyncio.get_running_loop().call_later(_LONG_WAIT, self._tell_wait, generation.model)

        def send(tokens: list[TokenEvent]) -> bool:
            for answer in teller.encode([*tokens]):
                self.relay.put(answer)
            return self.relay.is_writable

        live = LiveText(send, self.relay.wait_writable)

        async def sink(part: SubRequest, events: list[EngineEvent]) -> bool | LiveText:
            notice.cancel()
            for index, note in part.read_notes():
                if note.records:
                    self._tell_event("trace", branch=index, records=note.trace)
            for answer in teller.encode(events):
                self.relay.put(answer)
            if teller.is_over:
                return True
            await self.relay.wait_writable()
            return live if part.is_plain else False

        try:
            await generation.run(sink, tells_failures=True)
        except BridleError as error:  # the engine was lost, or a controller violated its announcement
            self.story.error = error
            for answer in teller.fail(error):
                self.relay.put(answer)
        finally:
            notice.cancel()
        if self.save is not None and not teller.has_failed:
            output = generation.parts[0].collector.output
            self.save.fill((*output.prompt_token_ids, *output.outputs[0].token_ids))

    def _tell_wait(self, model: LoadedModel) -> None:
        self._say("queued", num_waiting=model.client.statistics().num_waiting)

    def _tell_load(self, what: str, adapter: str | None) -> None:
        self._say(what, **({"model": self.request.model} if adapter is None else {"adapter": adapter}))

    def _say(self, event: str, **data: Any) -> None:
        """Send a notice to the client, if the client knows the extensions."""
        if self.is_extended:
            self._tell_event(event, **data)

    def _tell_event(self, event: str, **data: Any) -> None:
        """Send an event to the client."""
        self.relay.put(EventMessage(event=event, stream_id=self.request.stream_id, data=data))
