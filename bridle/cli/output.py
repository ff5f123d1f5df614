"""Read the first output of a request as text, and measure how fast it came."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridle.outputs import Finished, FinishReason, TokenEvent, Usage

if TYPE_CHECKING:
    from bridle.engine.request import Request
    from bridle.service.loading import LoadedModel


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

    def __iter__(self) -> Iterator[str]:
        self.started = self.clock()
        with self.model.client.submit(self.request) as stream:
            for events in stream:
                for event in events:
                    if isinstance(event, TokenEvent):
                        self._count()
                        yield event.text
                    elif isinstance(event, Finished):
                        yield event.text
                        self._finish(event)

    def _count(self) -> None:
        self.last = self.clock()
        self.first = self.first or self.last
        self.num_tokens += 1

    def _finish(self, event: Finished) -> None:
        self.usage, self.reason = event.usage, event.reason
        if event.error is not None:
            raise event.error

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token: the prompt's share of the time does not count."""
        seconds = self.last - self.first
        return (self.num_tokens - 1) / seconds if seconds > 0 else 0.0

    @property
    def summary(self) -> str:
        """One line: counts, time to the first token, speed, why it ended."""
        parts = [f"{self.usage.prompt_tokens} tokens in"]
        if self.usage.cached_tokens:
            parts[0] += f" ({self.usage.cached_tokens} cached)"
        parts.append(f"{self.usage.completion_tokens} out")
        if self.num_tokens:
            parts.append(f"first after {self.first - self.started:.2f} s")
        if self.num_tokens > 1:
            parts.append(f"then {self.tokens_per_second:.1f} tokens/s")
        if self.reason is FinishReason.LENGTH:
            parts.append("cut at --max-tokens or the context limit")
        return ", ".join(parts)
