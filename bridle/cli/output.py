"""Reads the first output of a request as text, and measures the speed of generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bridle.engine.request import Request
from bridle.outputs import Event, FinishReason, RequestOutput, Traced
from bridle.serving.lifecycle.request_handle import RequestHandle, run
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.models.loading import LoadedModel
from bridle.serving.outputs.output_collector import raise_first_error
from bridle.serving.outputs.stream_deltas import DeltaReader, RewindPolicy, split_at_rewinds
from bridle.traces import Record


class TerminalTextStream:
    """Iterator over the text of a request's first output. The request is submitted when the iteration begins.

    Text that a controller may roll back is held until it is final. If `marks` is set, text is yielded at once, and a
    mark shows where text was rolled back. Leaving the iteration early cancels the request. The iteration raises the
    error that ended an output.
    """

    def __init__(
        self,
        model: LoadedModel,
        request: Request,
        *,
        marks: bool = False,
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        """Create the stream. `on_record` receives the trace records of a traced request."""
        self.story = RequestRecord(id=request.id)
        self._client = model.client
        self._request = request
        self._policy = RewindPolicy.MARK if marks else RewindPolicy.HOLD
        self._on_record = on_record
        self._running: RequestHandle | None = None
        self._deltas: DeltaReader | None = None
        self._num_first = 0  # tokens that arrived together with the first token

    def __iter__(self) -> Iterator[str]:
        with run(self._client, self._request, story=self.story) as self._running:
            self._deltas = DeltaReader(self._running.collector, self._policy)
            yield from self._read(self._running, self._deltas)

    def stop(self) -> Iterator[str]:
        """Cancel the request. Yields the generated text that was not read yet; the property `output` then has the whole
        text."""
        if self._running is not None and self._deltas is not None:
            self._running.cancel()
            yield from self._read(self._running, self._deltas)

    @property
    def output(self) -> RequestOutput:
        """Return the output read so far."""
        assert self._running is not None  # the stream was iterated over
        return self._running.output

    def _read(self, running: RequestHandle, deltas: DeltaReader) -> Iterator[str]:
        yield from _texts(deltas)
        for events in running.stream:
            for piece in split_at_rewinds(events):
                running.add(piece)
                self._tell(piece)
                yield from _texts(deltas)
            self._num_first = self._num_first or self.story.num_tokens
        raise_first_error(running.output)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Traced) and self._on_record is not None:
                self._on_record(event.record)

    @property
    def tokens_per_second(self) -> float:
        """Return the output tokens per second after the first batch of tokens, so that the prompt's time does not
        count. Returns 0 if only one batch of tokens arrived."""
        seconds = (self.story.last_token or 0.0) - (self.story.first_token or 0.0)
        return (self.story.num_tokens - self._num_first) / seconds if seconds > 0 else 0.0

    @property
    def summary(self) -> str:
        """Return a line with token counts, time to the first token, speed, accepted draft tokens, and the limit that
        ended the output, if any."""
        story, usage = self.story, self.output.usage
        parts = [f"{usage.prompt_tokens} tokens in"]
        if usage.cached_tokens:
            parts[0] += f" ({usage.cached_tokens} cached)"
        parts.append(f"{usage.completion_tokens} out")
        if story.first_token is not None and story.submitted is not None:
            parts.append(f"first after {story.first_token - story.submitted:.2f} s")
        if story.num_tokens > self._num_first:
            parts.append(f"then {self.tokens_per_second:.1f} tokens/s")
        if usage.drafted_tokens:
            parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} drafted right")
        if self.output.outputs[0].finish_reason is FinishReason.LENGTH:
            parts.append("cut at --max-tokens or the context limit")
        return ", ".join(parts)


def _texts(deltas: DeltaReader) -> Iterator[str]:
    """Yield the new text of the first output."""
    return (delta.text for delta in deltas.read() if delta.index == 0 and delta.text)
