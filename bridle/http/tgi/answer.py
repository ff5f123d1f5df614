"""Writes the outputs of a generation in the native shapes: one object, or an event for each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bridle.http.generation import Generation, Part
from bridle.http.sse import SseWriter
from bridle.http.tgi.plan import Plan
from bridle.http.tgi.shapes import TokenRows, finish_word, token_texts, usage_fields
from bridle.outputs import CompletionOutput
from bridle.service import Delta, best_outputs


@dataclass(slots=True)
class Answer:
    """`prompt` is the text that came; `generation` has one part."""

    generation: Generation
    plan: Plan
    prompt: str
    _rows: TokenRows = field(init=False)
    _num_sent: int = 0

    def __post_init__(self) -> None:
        self._rows = TokenRows(self.generation.model.tokenizer)

    @property
    def _part(self) -> Part:
        return self.generation.parts[0]

    # -- whole -----------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """The answer of a call that does not stream. The best of several outputs is the answer, the others are
        details; so are the further branches of one that a controller forked."""
        ranked = self._ranked()
        answer: dict[str, Any] = {"generated_text": self._text(ranked[0])}
        if self.plan.wants_details:
            details = self._details(ranked[0]) | {"prefill": self._prefill()}
            if len(ranked) > 1:
                details["best_of_sequences"] = [self._loser(output) for output in ranked[1:]]
            answer["details"] = details
        return answer

    def _ranked(self) -> list[CompletionOutput]:
        outputs = self._part.outputs
        if self.plan.best_of == 1:
            return outputs
        order = [each.token_ids for each in best_outputs(outputs, len(outputs))]
        return sorted(outputs, key=lambda output: order.index(output.token_ids))

    def _loser(self, output: CompletionOutput) -> dict[str, Any]:
        return {"generated_text": self._text(output)} | self._details(output) | {"prefill": self._prefill()}

    def _details(self, output: CompletionOutput) -> dict[str, Any]:
        texts = token_texts(output, self._ends(output), 0, len(output.token_ids))
        entries = output.logprobs or [None] * len(output.token_ids)
        rows = zip(output.token_ids, texts, entries, strict=True)
        details = self._ending(output) | {"tokens": [self._rows.row(*row) for row in rows]}
        if self.plan.num_top:
            details["top_tokens"] = [self._rows.top(entry, self.plan.num_top) for entry in entries]
        return details | self._part.notes.take(output.index).fields()

    def _prefill(self) -> list[dict[str, Any]]:
        return self._rows.prefill(self._part.collector.output) if self.plan.wants_prefill else []

    # -- stream ----------------------------------------------------------------------------------------------

    async def stream(self, writer: SseWriter) -> None:
        """An event for each token of the first output."""

        async def sink(part: Part) -> None:
            for delta, _ in part.take():
                if delta.index == 0:
                    await writer.send(*self._events(delta))

        await self.generation.run(sink)

    def _events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Events of the tokens that can be told now. The last one waits for its successor if the output may end
        without another token: that one has to bring the rest of the text."""
        output = self._part.outputs[0]
        stop = delta.start + len(delta.tokens)
        if not delta.is_last and self._part.request.controller is not None:
            stop -= 1
        texts = token_texts(output, self._ends(output), self._num_sent, stop)
        for text in texts:
            position = self._num_sent
            self._num_sent += 1
            yield self._event(output, position, text, is_last=delta.is_last and self._num_sent == stop)

    def _event(self, output: CompletionOutput, position: int, text: str, is_last: bool) -> dict[str, Any]:
        entry = output.logprobs[position] if output.logprobs is not None else None
        event: dict[str, Any] = {
            "index": position + 1,
            "token": self._rows.row(output.token_ids[position], text, entry),
        }
        if self.plan.num_top:
            event["top_tokens"] = self._rows.top(entry, self.plan.num_top)
        details = None
        if is_last and self.plan.wants_details:
            num_prompt = len(self._part.collector.output.prompt_token_ids)
            details = self._ending(output) | {"input_length": num_prompt}
            details |= self._part.notes.take(0).fields()
        return event | {"generated_text": self._text(output) if is_last else None, "details": details}

    # -- both ------------------------------------------------------------------------------------------------

    def _ending(self, output: CompletionOutput) -> dict[str, Any]:
        sampling = self._part.request.sampling
        return {
            "finish_reason": finish_word(output),
            "generated_tokens": len(output.token_ids),
            "seed": None if sampling.is_greedy else sampling.seed,
            "usage": usage_fields(output.usage),
        }

    def _text(self, output: CompletionOutput) -> str:
        return self.prompt + output.text if self.plan.wants_full_text else output.text

    def _ends(self, output: CompletionOutput) -> list[int]:
        return self._part.collector.growing[output.index].ends
