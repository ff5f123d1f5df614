"""Writes the outputs of a generation in SGLang's format: an object for each output, with `meta_info`. Each event of a
stream has the whole text so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bridle.http.sglang.schemas import SglangBody
from bridle.http.sse import SseWriter
from bridle.outputs import CompletionOutput, FinishReason, Logprob
from bridle.serving import Delta
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.outputs.stream_extras import StreamExtras


@dataclass(slots=True)
class _Sent:
    """The amount of an output that a stream has already sent."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob | None] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if delta.taken_tokens:
            del self.tokens[-delta.taken_tokens :]
            del self.logprobs[-delta.taken_tokens :]
        self.text = self.text[: len(self.text) - delta.taken_chars] + delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs


def _noted(row: dict[str, Any], note: StreamExtras | None) -> dict[str, Any]:
    """Add the logs and variables of an output to the output's object."""
    if note is not None:
        row["meta_info"] |= note.fields()
    return row


@dataclass(slots=True)
class SglangResponse:
    """Writes the response to `body`, which requests `num_wanted` outputs for each prompt."""

    generation: Generation
    body: SglangBody
    num_wanted: int
    num_prompts: int
    _sent: dict[tuple[int, int], _Sent] = field(default_factory=dict)

    @property
    def is_list(self) -> bool:
        return self.body.is_batch or self.num_wanted > 1

    def whole(self) -> Any:
        """Return the response of a request that does not stream."""
        rows = []
        for part in self.generation.parts:
            for output in part.outputs:
                sent = _Sent(output.text, list(output.token_ids), list(output.logprobs or ()))
                row = _noted(self._row(part, output, sent, is_last=True), part.note(output.index))
                rows.append((self._number(part, output.index), row))
        found = [row for _, row in sorted(rows, key=lambda each: each[0])]
        return found if self.is_list or len(found) > 1 else found[0]

    async def stream(self, writer: SseWriter) -> None:
        """Send the events of a request that streams."""

        async def sink(part: SubRequest, events: object) -> None:
            await writer.send(*(_noted(self._event(part, delta), note) for delta, note in part.read()))

        await self.generation.run(sink)
        writer.end()

    def _event(self, part: SubRequest, delta: Delta) -> dict[str, Any]:
        sent = self._sent.setdefault((part.number, delta.index), _Sent())
        sent.add(delta)
        output = part.collector.growing[delta.index].output
        row = self._row(part, output, sent, delta.is_last)
        return row | {"index": self._number(part, delta.index)} if self.is_list or delta.index else row

    def _number(self, part: SubRequest, index: int) -> int:
        """Return the number of an output. With a controller, each requested output of a prompt is a separate
        sub-request. The numbers of forks follow the numbers of the requested outputs."""
        if part.is_steered:
            return part.number if index == 0 else len(self.generation.parts) + index
        return part.number * self.num_wanted + index

    def _row(self, part: SubRequest, output: CompletionOutput, sent: _Sent, is_last: bool) -> dict[str, Any]:
        number = self._number(part, output.index)
        name = self.body.id_of(min(number // self.num_wanted, self.num_prompts - 1), self.generation.story.id)
        name = f"{name}_{number % self.num_wanted}" if self.num_wanted > 1 else name
        meta: dict[str, Any] = {
            "id": name,
            "finish_reason": self._ending(output) if is_last else None,
            "prompt_tokens": len(part.request.prompt),
            "completion_tokens": len(sent.tokens),
            "cached_tokens": output.usage.cached_tokens,
            "seed": output.seed,
        }
        if is_last:
            meta["e2e_latency"] = time.monotonic() - self.generation.story.began
            meta |= output.usage.predictions() | output.usage.constraint_fields()
        meta |= self._logprobs(part, sent)
        return {"text": sent.text, "output_ids": list(sent.tokens), "meta_info": meta}

    def _ending(self, output: CompletionOutput) -> dict[str, Any]:
        if output.finish_reason is FinishReason.LENGTH:
            return {"type": "length", "length": len(output.token_ids)}
        ends = sorted(self.generation.model.tokenizer.eos_token_ids)
        matched = output.stop_reason if output.stop_reason is not None or not ends else ends[0]
        return {"type": "stop", "matched": matched}

    def _logprobs(self, part: SubRequest, sent: _Sent) -> dict[str, Any]:
        num_top, start = self.body.num_top_logprobs, self.body.logprobs_from
        if num_top is None:
            return {}
        given = part.collector.output
        first = len(given.prompt_token_ids) if start is None else start
        tokens, entries = given.prompt_token_ids[first:], (given.prompt_logprobs or [])[first:]
        entries = [None, *entries[1:]] if entries else [None] * len(tokens)  # nothing predicts the first token
        found: dict[str, Any] = {
            "input_token_logprobs": self._rows(tokens, entries),
            "output_token_logprobs": self._rows(sent.tokens, sent.logprobs),
        }
        if num_top:
            found["input_top_logprobs"] = [self._top(entry, num_top) for entry in entries]
            found["output_top_logprobs"] = [self._top(entry, num_top) for entry in sent.logprobs]
        return found

    def _rows(self, tokens: Sequence[int], entries: Sequence[Logprob | None]) -> list[list[Any]]:
        pairs = zip(tokens, entries, strict=True)
        return [[None if entry is None else entry.logprob, token, self._text(token)] for token, entry in pairs]

    def _top(self, entry: Logprob | None, num_top: int) -> list[list[Any]] | None:
        if entry is None:
            return None
        return [[logprob, token, self._text(token)] for token, logprob in entry.top[:num_top]]

    def _text(self, token: int) -> str | None:
        return self.generation.model.tokenizer.token_text(token) if self.body.return_text_in_logprobs else None
