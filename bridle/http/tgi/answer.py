"""Writes the outputs of a generation in text-generation-inference's format: one object, or an event for each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bridle.http.sse import SseWriter, sse_event
from bridle.http.tgi.plan import Plan
from bridle.http.tgi.shapes import TokenRows, finish_word, token_texts, usage_fields
from bridle.outputs import CompletionOutput, Logprob, TokenEvent
from bridle.serving import Delta
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.lifecycle.live_text import LiveText
from bridle.serving.outputs.output_collector import rank

_NOT_LAST = {"generated_text": None, "details": None}


@dataclass(slots=True)
class TgiResponse:
    """Writes the response to a request of text-generation-inference's API. `prompt` is the request's text. If
    `generation` has several sub-requests, the best output is the answer."""

    generation: Generation
    plan: Plan
    prompt: str
    _rows: TokenRows = field(init=False)
    _num_sent: int = 0

    def __post_init__(self) -> None:
        self._rows = TokenRows(self.generation.model.tokenizer)

    @property
    def _part(self) -> SubRequest:
        return self.generation.parts[0]

    # -- complete answers ------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream. The best output is the answer. Other outputs,
        including forks, are in `best_of_sequences`."""
        (part, output), *others = self._ranked()
        answer: dict[str, Any] = {"generated_text": self._text(output)}
        if self.plan.wants_details:
            details = self._details(part, output) | {"prefill": self._prefill()}
            if others:
                details["best_of_sequences"] = [self._loser(*each) for each in others]
            answer["details"] = details
        return answer | part.trace_fields(output.index)

    def _ranked(self) -> list[tuple[SubRequest, CompletionOutput]]:
        outputs = [(part, output) for part in self.generation.parts for output in part.outputs]
        return outputs if self.plan.best_of == 1 else sorted(outputs, key=lambda each: rank(each[1]))

    def _loser(self, part: SubRequest, output: CompletionOutput) -> dict[str, Any]:
        details = self._details(part, output) | {"prefill": self._prefill()}
        return {"generated_text": self._text(output)} | details

    def _details(self, part: SubRequest, output: CompletionOutput) -> dict[str, Any]:
        texts = token_texts(output, _ends(part, output), 0, len(output.token_ids))
        entries = output.logprobs or [None] * len(output.token_ids)
        rows = zip(output.token_ids, texts, entries, strict=True)
        details = _ending(part, output) | {"tokens": [self._rows.row(*row) for row in rows]}
        if self.plan.num_top:
            details["top_tokens"] = [self._rows.top(entry, self.plan.num_top) for entry in entries]
        return details | part.note_fields(output.index)

    def _prefill(self) -> list[dict[str, Any]]:
        return self._rows.prefill(self._part.collector.output) if self.plan.wants_prefill else []

    # -- stream ----------------------------------------------------------------------------------------------

    async def stream(self, writer: SseWriter) -> None:
        """Send an event for each token of the first output."""

        async def sink(part: SubRequest, events: object) -> LiveText | None:
            for delta in part.reader.read():  # a controller's logs and variables are sent at the end
                if delta.index == 0:
                    await writer.send(*self._events(delta))
            is_live = part.is_plain and part.request.controller is None and not part.tells_trace
            return writer.live(self._live_events) if is_live else None

        await self.generation.run(sink)

    def _events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the events of tokens that can be sent now. The last token waits if the output may end without another
        token, because the last event must have the rest of the text."""
        output = self._part.outputs[0]
        stop = delta.start + len(delta.tokens)
        if not delta.is_last and self._part.request.controller is not None:
            stop = max(stop - 1, self._num_sent)
        texts = token_texts(output, _ends(self._part, output), self._num_sent, stop)
        for text in texts:
            position = self._num_sent
            self._num_sent += 1
            yield self._event(output, position, text, is_last=delta.is_last and self._num_sent == stop)
        if delta.is_last and not self._num_sent:
            yield self._empty_event(output)

    def _live_events(self, tokens: list[TokenEvent]) -> bytes:
        """Encode the events of tokens after which the output continues."""
        events = []
        for token in tokens:
            self._num_sent += 1
            events.append(self._row(self._num_sent, token.token, token.text, token.logprob) | _NOT_LAST)
        return b"".join(map(sse_event, events))

    def _event(self, output: CompletionOutput, position: int, text: str, is_last: bool) -> dict[str, Any]:
        entry = output.logprobs[position] if output.logprobs is not None else None
        event = self._row(position + 1, output.token_ids[position], text, entry)
        return event | (self._last_words(output) if is_last else _NOT_LAST) | self._part.trace_fields(0)

    def _row(self, number: int, token: int, text: str, entry: Logprob | None) -> dict[str, Any]:
        event: dict[str, Any] = {"index": number, "token": self._rows.row(token, text, entry)}
        if self.plan.num_top:
            event["top_tokens"] = self._rows.top(entry, self.plan.num_top)
        return event

    def _empty_event(self, output: CompletionOutput) -> dict[str, Any]:
        """Return the event for an output that ended before its first token. The event has the end-of-sequence token,
        because clients read the end of an output from a token's event."""
        token = next(iter(self.generation.model.tokenizer.eos_token_ids), 0)
        told = self._part.trace_fields(0)
        return {"index": 1, "token": self._rows.row(token, "", None)} | self._last_words(output) | told

    def _last_words(self, output: CompletionOutput) -> dict[str, Any]:
        details = None
        if self.plan.wants_details:
            num_prompt = len(self._part.collector.output.prompt_token_ids)
            details = _ending(self._part, output) | {"input_length": num_prompt} | self._part.note_fields(0)
        return {"generated_text": self._text(output), "details": details}

    # -- complete answers and streams ------------------------------------------------------------------------

    def _text(self, output: CompletionOutput) -> str:
        return self.prompt + output.text if self.plan.wants_full_text else output.text


def _ending(part: SubRequest, output: CompletionOutput) -> dict[str, Any]:
    sampling = part.request.sampling
    return {
        "finish_reason": finish_word(output),
        "generated_tokens": len(output.token_ids),
        "seed": None if sampling.is_greedy else output.seed,
        "usage": usage_fields(output.usage),
    }


def _ends(part: SubRequest, output: CompletionOutput) -> list[int]:
    return part.collector.growing[output.index].ends
