"""State of a request that runs on a replica, so that another replica can continue it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from bridle import outputs as o
from bridle.distributed.codec.controllers import is_repeatable
from bridle.engine.async_engine import wake_all
from bridle.engine.client import EventStream
from bridle.engine.request import Request
from bridle.errors import BridleError, ControllerError, InternalError

#: A request ends after this many replicas were lost in a row while it ran or waited there, without progress in between.
#: Another request may be the cause, but a request that crashes replicas must end.
MAX_LOSSES = 10


@dataclass(slots=True)
class RoutedRequest:
    """A request that has not ended, with the events that its client has received."""

    request: Request
    stream: EventStream
    replica: int | None = None
    load: int = 0
    vectors: Collection[str] = ()  # keys of the control vectors that it uses
    num_losses: int = 0
    is_cancelled: bool = False
    has_prompt: bool = False
    sent: dict[int, list[o.Event]] = field(default_factory=dict)
    num_again: dict[int, int] = field(default_factory=dict)
    notes_sent: Counter[tuple[int, str]] = field(default_factory=Counter)
    notes_again: Counter[tuple[int, str]] = field(default_factory=Counter)

    @property
    def is_plain(self) -> bool:
        """Return whether another replica can continue the output from its tokens, without regenerating it from its
        seed."""
        return self.request.is_plain

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the output tokens that the client has received, from which a plain output continues; empty if the
        output is not plain."""
        if not self.is_plain:
            return ()
        return tuple(event.token for event in self.sent.get(0, ()) if isinstance(event, o.TokenEvent))

    @property
    def parked_tokens(self) -> tuple[int, ...]:
        """Return the tokens of prompt and first output if their KV is retained for the next request of the
        conversation; else empty."""
        sent = self.sent.get(0, ())
        last = sent[-1] if sent else None
        if not self.request.parks or not isinstance(last, o.Finished) or last.reason not in o.BY_ITSELF:
            return ()
        tokens = list(self.request.prompt)
        for event in sent:
            if isinstance(event, o.TokenEvent):
                tokens.append(event.token)
            elif isinstance(event, o.Rewind):
                del tokens[len(tokens) - event.num_tokens :]
        return tuple(tokens)

    @property
    def open_outputs(self) -> Sequence[int]:
        """Return the indices of the outputs whose end the client has not received."""
        sent = self.sent or {0: []}
        return [index for index, events in sent.items() if not (events and isinstance(events[-1], o.Finished))]

    @property
    def remaining(self) -> Request:
        """Return the request with which another replica continues the output."""
        tokens = self.tokens
        return replace(self.request, generated=tokens) if tokens else self.request

    def tell(self, events: list[o.Event]) -> None:
        """Send events to the client."""
        self.stream.put(events)
        wake_all([self.stream])

    def tell_resuming(self) -> None:
        """Report to the client, if it requested such events, that its outputs wait for another replica."""
        if self.request.tell_resuming:
            self.tell([o.Resuming(self.request.id, index) for index in self.open_outputs])

    def end(self, reason: o.FinishReason, error: BridleError | None = None) -> None:
        """Send the end of all unfinished outputs, or of output 0 if there are none, because the client waits for an
        end."""
        *_, last = outputs = [*self.open_outputs] or [0]
        self.tell([o.Finished(self.request.id, i, reason, error=error, is_last=i == last) for i in outputs])

    def begin_again(self) -> None:
        """Reset the counters, because the request is sent to a replica again."""
        self.num_again = {}
        self.notes_again.clear()

    def is_news(self, event: o.Event) -> bool:
        """Return whether the client has not received this event yet, and record the event.

        Raises an error if a regenerated output differs from the output that the client has: `ControllerError` if a
        controller may be the cause, otherwise `InternalError`.
        """
        if isinstance(event, o.Resuming | o.PromptProgress):
            return True
        if isinstance(event, (o.Log, o.Stored)):
            return self._is_news_note(event)
        if isinstance(event, o.Traced):
            return self._is_past_what_was_sent(event.index)
        if isinstance(event, o.PromptEvent):
            is_first, self.has_prompt = not self.has_prompt, True
            return is_first
        sent = self.sent.setdefault(event.index, [])
        position = self.num_again.get(event.index, 0)
        if not self.is_plain and position < len(sent):
            self.num_again[event.index] = position + 1
            self._check_same(sent[position], event)
            return False
        sent.append(event)
        self.num_again[event.index] = position + 1
        self.num_losses = 0  # the request makes progress
        return True

    def _is_past_what_was_sent(self, index: int) -> bool:
        """Return whether a regenerated output has reached the end of the events that the client has. Earlier trace
        records are not sent, because they may differ from the first run's if tokens are cached or controllers late."""
        return self.is_plain or self.num_again.get(index, 0) >= len(self.sent.get(index, ()))

    def _is_news_note(self, event: o.Log | o.Stored) -> bool:
        """Return whether a log or stored value is new to the client, judged by the number of characters or values
        sent."""
        key, size = (
            ((event.index, "log"), len(event.text)) if isinstance(event, o.Log) else ((event.index, "stored"), 1)
        )
        self.notes_again[key] += size
        is_news = self.notes_again[key] > self.notes_sent[key]
        self.notes_sent[key] = max(self.notes_again[key], self.notes_sent[key])
        return is_news

    def _check_same(self, before: o.Event, again: o.Event) -> None:
        is_same = type(before) is type(again)
        if is_same and isinstance(before, o.TokenEvent) and isinstance(again, o.TokenEvent):
            is_same = before.token == again.token
        if is_same:
            return
        if is_repeatable(self.request.controller):
            raise InternalError(f"the output was generated again, with {again} instead of {before}; it cannot continue")
        raise ControllerError(
            "the replica of the request ended, and the controller did something else when it ran again: the output "
            "cannot continue"
        )
