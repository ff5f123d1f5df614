"""Read the first output of a request as text, and measure how fast it came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridle.outputs import Event, Finished, FinishReason, TokenEvent, Traced, Usage

if TYPE_CHECKING:
    from bridle.engine.client import EventStream
    from bridle.engine.request import Request
    from bridle.service.loading import LoadedModel
    from bridle.traced import Record, Trace


@dataclass(slots=True)
class TextStream:
    """The text of a running request, piece by piece. `usage` and `reason` are known when it ends.

    Leaving the iteration early cancels the request. Raises the error that ended the output, if one did.
    """

    model: LoadedModel
    request: Request
    clock: Callable[[], float] = time.monotonic
    usage: Usage = field(default_factory=Usage)
    reason: FinishReason | None = None
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_first: int = 0  # tokens that came with the first one
    trace: Trace | None = None  # of a request that asks for one
    on_record: Callable[[Record], None] | None = None
    _stream: EventStream | None = None
    _events: deque[Event] = field(default_factory=deque)  # arrived, and not read yet

    def __post_init__(self) -> None:
        if self.request.trace:
            from bridle.service.tracing import name_engine, new_trace

            self.trace = new_trace(self.request)
            name_engine(self.trace, self.model.name, self.model.info)

    def __iter__(self) -> Iterator[str]:
        self.started = self.clock()
        self._stream = self.model.client.submit(self.request)
        with self._stream:
            yield from self._read(self._stream)

    def stop(self) -> Iterator[str]:
        """Cancel the request; gives the text that was generated until then and not read. `usage` counts all of it."""
        if self._stream is not None:
            self._stream.cancel()
            yield from self._read(self._stream)

    def _read(self, stream: EventStream) -> Iterator[str]:
        yield from self._take()
        for events in stream:
            self._events.extend(events)
            yield from self._take()
            self.num_first = self.num_first or self.num_tokens

    def _take(self) -> Iterator[str]:
        while self._events:
            event = self._events.popleft()
            if isinstance(event, TokenEvent):
                self._count()
                yield event.text
            elif isinstance(event, Traced) and self.trace is not None:
                self.trace.add(event.told)
                if self.on_record is not None:
                    self.on_record(event.record)
            elif isinstance(event, Finished):
                self.usage, self.reason = event.usage, event.reason
                yield event.text
                if event.error is not None:
                    raise event.error

    def _count(self) -> None:
        self.last = self.clock()
        self.first = self.first or self.last
        self.num_tokens += 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after those that came first, so that the prompt's time does not count; 0 if none came
        later."""
        seconds = self.last - self.first
        return (self.num_tokens - self.num_first) / seconds if seconds > 0 else 0.0

    @property
    def summary(self) -> str:
        """One line: counts, time to the first token, speed, why it ended."""
        parts = [f"{self.usage.prompt_tokens} tokens in"]
        if self.usage.cached_tokens:
            parts[0] += f" ({self.usage.cached_tokens} cached)"
        parts.append(f"{self.usage.completion_tokens} out")
        if self.num_tokens:
            parts.append(f"first after {self.first - self.started:.2f} s")
        if self.num_tokens > self.num_first:
            parts.append(f"then {self.tokens_per_second:.1f} tokens/s")
        if self.reason is FinishReason.LENGTH:
            parts.append("cut at --max-tokens or the context limit")
        return ", ".join(parts)
