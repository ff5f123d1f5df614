"""Builds outputs from events: tokens and text are added, rolled back, and copied for forks.

Every front end uses a collector. A streaming reader uses `DeltaReader`; other readers read `output` at the end. This
module uses no wire formats and no engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass, field, replace

from bridle.engine.request import Request
from bridle.engine.sequence import copy_seed
from bridle.errors import BridleError, ControllerError
from bridle.outputs import (
    CompletionOutput,
    Embedded,
    Event,
    Finished,
    FinishReason,
    Forked,
    Log,
    PromptEvent,
    RequestOutput,
    Rewind,
    Stored,
    TokenEvent,
    Traced,
)
from bridle.serving.tracing.trace_header import new_trace
from bridle.structured_output import Constraint

_MAX_LOG_CHARS = 1 << 20
_MAX_STORED_BYTES = 1 << 24
_MAX_ERROR_LOG_CHARS = 4_096


@dataclass(slots=True)
class GrowingOutput:
    """One output while it grows. `ends[i]` is the number of characters of the text that were complete after token i.

    `low_tokens` and `low_chars` are the shortest lengths of the output since the last read. Everything that the reader
    has beyond these lengths was rolled back.
    """

    output: CompletionOutput
    ends: list[int] = field(default_factory=list)
    low_tokens: int = 0
    low_chars: int = 0

    def append(self, event: TokenEvent) -> None:
        output = self.output
        output.token_ids.append(event.token)
        if output.logprobs is not None:
            output.logprobs.append(event.logprob)
        output.text += event.text
        self.ends.append(len(output.text))

    def take_back(self, num_tokens: int, num_chars: int) -> None:
        output = self.output
        num_left, chars_left = len(output.token_ids) - num_tokens, len(output.text) - num_chars
        self._cut(num_left, chars_left)
        output.text = output.text[:chars_left]
        self.low_tokens, self.low_chars = min(self.low_tokens, num_left), min(self.low_chars, chars_left)

    def fork(self, index: int, num_tokens: int, text: str, seed: int | None) -> GrowingOutput:
        """Return a copy of the output at the time when it had `num_tokens` tokens and the text `text`."""
        parent = self.output
        child = CompletionOutput(
            index=index,
            text=text,
            token_ids=list(parent.token_ids),
            logprobs=None if parent.logprobs is None else list(parent.logprobs),
            seed=seed,
        )
        growing = GrowingOutput(child, list(self.ends))
        growing._cut(num_tokens, len(text))
        return growing

    def finish(self, event: Finished) -> None:
        output = self.output
        output.text += event.text
        output.finish_reason, output.stop_reason = event.reason, event.stop
        output.usage, output.error = event.usage, event.error

    def _cut(self, num_tokens: int, num_chars: int) -> None:
        """Keep the first `num_tokens` tokens and `num_chars` characters. The ends of tokens are limited to the kept
        characters."""
        del self.output.token_ids[num_tokens:], self.ends[num_tokens:]
        if self.output.logprobs is not None:
            del self.output.logprobs[num_tokens:]
        position = len(self.ends) - 1
        while position >= 0 and self.ends[position] > num_chars:
            self.ends[position] = num_chars
            position -= 1


class OutputCollector:
    """Collects the events of one request. `output` can be read at any time. `output` is complete when the event stream
    has ended."""

    def __init__(self, request: Request, prompt_text: str | None = None) -> None:
        self.request = request
        self.growing: dict[int, GrowingOutput] = {}
        self.has_prompt = False
        sampling = request.sampling
        first = CompletionOutput(0, logprobs=None if sampling.logprobs is None else [], seed=sampling.seed)
        self.growing[0] = GrowingOutput(first)
        #: All outputs so far, in order of their index. Read-only.
        self.output = RequestOutput(request.id, prompt_text, list(request.prompt), [first])
        if request.trace:
            self.output.trace = new_trace(request, prompt_text)

    def add(self, events: Iterable[Event]) -> None:
        """Add events, in their order."""
        for event in events:
            match event:
                case TokenEvent():
                    self.growing[event.index].append(event)
                case Traced():
                    if self.output.trace is not None:
                        self.output.trace.add(event.told)
                case Rewind():
                    self.growing[event.index].take_back(event.num_tokens, event.num_chars)
                case Forked():
                    parent = self.growing[event.parent]
                    seed = self._seed_of(event.index)
                    self.growing[event.index] = parent.fork(event.index, event.num_tokens, event.text, seed)
                    self.output.outputs[:] = [self.growing[index].output for index in sorted(self.growing)]
                case Finished():
                    self.growing[event.index].finish(event)
                case PromptEvent():
                    self.has_prompt = True
                    self.output.num_cached_tokens = event.num_cached
                    if event.tokens:  # a controller may have rewritten the prompt
                        self.output.prompt_token_ids = list(event.tokens)
                    if self.request.sampling.prompt_logprobs is not None:
                        self.output.prompt_logprobs = list(event.logprobs)
                case Embedded():
                    self.output.embedding = event.vector
                case Log():
                    output = self.growing[event.index].output
                    output.logs = (output.logs + event.text)[-_MAX_LOG_CHARS:]
                case Stored():
                    self._store(event)

    def _seed_of(self, index: int) -> int | None:
        """Return the seed of a fork. Forks of a controller have the seed of their request. If the request has several
        outputs, forks of a controller have no seed."""
        sampling, controller = self.request.sampling, self.request.controller
        if sampling.n == 1 or sampling.seed is None:
            return sampling.seed
        is_alone = controller is None or isinstance(controller, Constraint)  # so output `index` is copy `index`
        return copy_seed(sampling.seed, index) if is_alone else None

    def _store(self, event: Stored) -> None:
        storage = self.output.storage
        value = storage.get(event.name, b"") + event.value if event.is_append else event.value
        others = sum(len(known) for name, known in storage.items() if name != event.name)
        if others + len(value) <= _MAX_STORED_BYTES:
            storage[event.name] = value


async def collect(stream: AsyncIterable[list[Event]], collector: OutputCollector) -> RequestOutput:
    """Read a stream of events to its end. Returns the complete output."""
    async for events in stream:
        collector.add(events)
    return collector.output


def raise_first_error(output: RequestOutput) -> None:
    """Raise the error of the first output that ended with an error. A cancelled output has no error."""
    for each in output.outputs:
        if each.error is not None:
            raise with_logs(each.error, each)


def with_logs(error: BridleError, output: CompletionOutput) -> BridleError:
    """Return the error of an output. If a controller caused the error, the end of the controller's log is added."""
    if isinstance(error, ControllerError):
        error.logs = output.logs[-_MAX_ERROR_LOG_CHARS:] or error.logs
    return error


def mean_logprob(output: CompletionOutput) -> float:
    """Return the mean log-probability of an output's tokens, without those that have none; minus infinity for an empty
    output."""
    known = [entry.logprob for entry in output.logprobs or () if entry is not None]
    return sum(known) / len(known) if known else float("-inf")


def rank(output: CompletionOutput) -> tuple[bool, float, int]:
    """Return the sort key that puts the best outputs first."""
    return output.finish_reason is FinishReason.OUTRANKED, -mean_logprob(output), output.index


def best_outputs(outputs: list[CompletionOutput], num_wanted: int) -> list[CompletionOutput]:
    """Return the outputs with the highest mean log-probabilities, best first. The returned outputs are numbered from 0.
    The outputs must have log-probabilities. Empty outputs come after all others. Outputs that were ended early, because
    they could not be among the best, come last.
    """
    ranked = sorted(outputs, key=rank)
    return [replace(output, index=index) for index, output in enumerate(ranked[:num_wanted])]
