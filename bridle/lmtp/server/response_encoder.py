"""Converts an engine's events to the answers of one stream.

A stream has one answer for each token, and at least one answer. The last answer has the finish reason. The last token
of an output usually arrives together with the finish reason. So a token is usually held only until the end of its batch
of events. If a controller steers, each token is held until the next token, because the controller can stop without a
token. If the client does not know the extensions, tokens from the fourth on are held, because LMQL ignores later
errors.

This module depends only on engine events, not on connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from bridle.controller_tools import CALL_VARIABLE
from bridle.controllers.composition import user_controllers
from bridle.engine.request import Request
from bridle.errors import BridleError, InvalidRequest
from bridle.lmtp.failures import failure_of
from bridle.lmtp.messages import EventMessage, StreamAnswer, StreamId, Token
from bridle.outputs import Event as EngineEvent
from bridle.outputs import Finished, FinishReason, Forked, Log, PromptEvent, Rewind, Stored, TokenEvent
from bridle.serving import DeltaReader, OutputCollector
from bridle.serving.lifecycle.generation import error_of

#: The number of tokens that LMQL reads before it uses the first one. The query sees a failure only among these tokens.
_NUM_READ_AHEAD = 4
_MAX_LOG_CHARS = 4_096
_REASONS = {FinishReason.STOP: "stop", FinishReason.CONTROLLER: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class EncodingOptions:
    """Options of a stream's answers. `with_text` adds text, and `shows_events` adds rewinds and forks. If the client
    does not know the extensions (`is_extended` is false), an error after the first tokens only ends the stream early.
    `eos` is the token for the answer of an output that has no tokens."""

    stream_id: StreamId
    eos: int
    with_text: bool = False
    is_extended: bool = False
    shows_events: bool = False


class AnswerEncoder(Protocol):
    """Interface that creates the answers of one stream. Once `is_over` is set, no answers follow. `has_failed` means
    that the stream ended with an error."""

    is_over: bool
    has_failed: bool

    def encode(self, events: list[EngineEvent]) -> Iterator[StreamAnswer]:
        """Yield the answers for a batch of events."""

    def fail(self, error: BridleError) -> Iterator[StreamAnswer]:
        """Yield the answers that end the stream with an error."""


class GenerateTeller:
    """Creates the answers to one GENERATE request. `num_told` counts the tokens that were sent."""

    def __init__(self, how: EncodingOptions, request: Request) -> None:
        self._how = how
        self._is_steered = user_controllers(request.controller) is not None
        self._seed = None if request.sampling.is_greedy else request.sampling.seed
        self._finals = FinalEvents(request) if self._is_steered and not how.shows_events else None
        self._waiting: dict[int, Token] = {}
        self.num_told = 0
        self.is_over = self.has_failed = False

    def encode(self, events: list[EngineEvent]) -> Iterator[StreamAnswer]:
        if self._is_steered and self._how.is_extended:
            yield from self._calls(events)
        for event in events if self._finals is None else self._finals.settled(events):
            yield from self._tell_one(event)
            if self.is_over:
                return
        if not self._holds_last:
            yield from self._flush(*self._waiting)

    def fail(self, error: BridleError) -> Iterator[StreamAnswer]:
        self.is_over = self.has_failed = True
        token = self._waiting.pop(0, None)
        ends_early = token is not None and self._may_end_early and not isinstance(error, InvalidRequest)
        if token is not None:
            token.finish_reason = "length" if ends_early else None
            yield token
        if not ends_early:
            yield failure_of(self._how.stream_id, error)

    @property
    def _may_end_early(self) -> bool:
        return not self._how.is_extended and not self._is_steered and self.num_told >= _NUM_READ_AHEAD - 1

    @property
    def _holds_last(self) -> bool:
        return self._may_end_early or self._finals is not None

    def _tell_one(self, event: EngineEvent) -> Iterator[StreamAnswer]:
        match event:
            case TokenEvent():
                yield from self._flush(event.index)
                self._waiting[event.index] = self._token(event)
            case Finished():
                yield from self._finish(event)
            case Rewind() if self._how.shows_events:
                yield from self._flush(event.index)
                yield self._event("rewind", event.index, num_tokens=event.num_tokens, num_chars=event.num_chars)
            case Forked() if self._how.shows_events:
                yield from self._flush(event.parent)
                yield self._event("fork", event.index, parent=event.parent, num_tokens=event.num_tokens)
            case Log() if self._how.shows_events:
                yield self._event("log", event.index, text=event.text[-_MAX_LOG_CHARS:])

    def _calls(self, events: list[EngineEvent]) -> Iterator[StreamAnswer]:
        """Yield events for tool calls that the client must answer, even if the client requested only final tokens."""
        for event in events:
            if isinstance(event, Stored) and event.name.startswith(CALL_VARIABLE):
                call = {"id": event.name.removeprefix(CALL_VARIABLE), **msgspec.json.decode(event.value)}
                yield self._event("tool_call", event.index, **call)

    def _finish(self, event: Finished) -> Iterator[StreamAnswer]:
        error = error_of(event)
        if error is not None:
            yield from self.fail(error)
            return
        token = self._waiting.pop(event.index, None) or self._last_resort(event.index)
        token.finish_reason = _REASONS[event.reason]
        if self._how.with_text:
            token.text = (token.text or "") + event.text
        if self._how.is_extended:
            token.usage, token.seed = event.usage.fields(), self._seed
        self.num_told += 1
        self.is_over = self._finals is not None  # clients without events get only the first output
        yield token

    def _token(self, event: TokenEvent) -> Token:
        known = event.logprob
        return Token(
            stream_id=self._how.stream_id,
            token=event.token,
            logprob=known.logprob if known is not None else 0.0,
            top_logprobs={**dict(known.top), known.token: known.logprob} if known is not None else {event.token: 0.0},
            text=event.text if self._how.with_text else None,
            branch=event.index,
        )

    def _last_resort(self, index: int) -> Token:
        """Return the answer for an output's finish reason, if the output has no unsent token to carry it."""
        if self._how.is_extended:
            return Token(stream_id=self._how.stream_id, token=None, branch=index)
        eos = self._how.eos
        return Token(stream_id=self._how.stream_id, token=eos, logprob=0.0, top_logprobs={eos: 0.0}, branch=index)

    def _flush(self, *branches: int) -> Iterator[Token]:
        for index in branches:
            token = self._waiting.pop(index, None)
            if token is not None:
                self.num_told += 1
                yield token

    def _event(self, event: str, branch: int, /, **data: object) -> EventMessage:
        return EventMessage(event=event, stream_id=self._how.stream_id, data={"branch": branch, **data})


class ScoreTeller:
    """Creates the answers to one SCORE request: the log-probabilities of the last `num_scored` tokens of the prompt."""

    def __init__(self, stream_id: StreamId, num_scored: int) -> None:
        self._stream_id = stream_id
        self._num_scored = num_scored
        self.is_over = self.has_failed = False

    def encode(self, events: list[EngineEvent]) -> Iterator[StreamAnswer]:
        for event in events:
            if isinstance(event, PromptEvent):
                yield from self._scores(event)
            elif isinstance(event, Finished) and (error := error_of(event)) is not None:
                yield from self.fail(error)

    def fail(self, error: BridleError) -> Iterator[StreamAnswer]:
        self.is_over = self.has_failed = True
        yield failure_of(self._stream_id, error)

    def _scores(self, event: PromptEvent) -> Iterator[Token]:
        tokens, scores = event.tokens[-self._num_scored :], event.logprobs[-self._num_scored :]
        for left, token, score in zip(range(len(tokens) - 1, -1, -1), tokens, scores, strict=True):
            yield Token(
                stream_id=self._stream_id,
                token=token,
                logprob=score.logprob if score is not None else 0.0,  # the first token has no predecessor
                finish_reason=None if left else "stop",
            )


class FinalEvents:
    """Selects the final events of the first output, for clients that do not know rewinds."""

    def __init__(self, request: Request) -> None:
        self._collector = OutputCollector(request)
        self._reader = DeltaReader(self._collector)

    def settled(self, events: list[EngineEvent]) -> Iterable[EngineEvent]:
        """Add events. Returns the events that cannot be rolled back any more. Raises `ControllerError` if a controller
        rolled back more than it had announced."""
        self._collector.add(events)
        growing = self._collector.growing[0]
        for delta in self._reader.read():
            if delta.index != 0:
                continue
            entries = delta.logprobs or (None,) * len(delta.tokens)
            for position, (token, entry) in enumerate(zip(delta.tokens, entries, strict=True), delta.start):
                begin = growing.ends[position - 1] if position else 0
                text = growing.output.text[begin : growing.ends[position]]
                yield TokenEvent("", 0, token, text, entry)
            if delta.is_last:
                output = growing.output
                tail = output.text[growing.ends[-1] if growing.ends else 0 :]
                assert output.finish_reason is not None
                yield Finished("", 0, output.finish_reason, output.usage, tail, output.stop_reason, output.error)
