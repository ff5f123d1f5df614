"""Builds parts of text-generation-inference's responses: objects for tokens, token counts, and response headers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bridle.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, Usage
from bridle.serving import LoadedModel
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no minus infinity


class TokenRows:
    """Writes tokens as objects with id, text, log-probability, and a flag for special tokens. The texts of all tokens
    that are not special add up to the text of the output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def row(self, token: int, text: str, entry: Logprob | None) -> dict[str, Any]:
        """Return the object for one generated token, whose text is `text`."""
        is_special = token in self._tokenizer.special_token_ids
        shown = self._tokenizer.token_text(token) if is_special and not text else text
        return {"id": token, "text": shown, "logprob": _number(entry), "special": is_special and shown != text}

    def top(self, entry: Logprob | None, num_top: int) -> list[dict[str, Any]]:
        """Return the objects for the `num_top` most probable tokens at the position of a generated token."""
        best = entry.top[:num_top] if entry is not None else ()
        return [
            {
                "id": token,
                "text": self._tokenizer.token_text(token),
                "logprob": max(logprob, _LOWEST),
                "special": token in self._tokenizer.special_token_ids,
            }
            for token, logprob in best
        ]

    def prefill(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the objects for the prompt's tokens. The first token has no log-probability."""
        entries = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        return [
            {
                "id": token,
                "text": self._tokenizer.token_text(token),
                "logprob": None if entry is None else _number(entry),
            }
            for token, entry in zip(output.prompt_token_ids, entries, strict=True)
        ]


def token_texts(output: CompletionOutput, ends: Sequence[int], start: int, stop: int) -> list[str]:
    """Return the text of each token from `start` to `stop`. The last token of a finished output gets the rest of the
    output's text."""
    marks = [ends[start - 1] if start else 0, *ends[start:stop]]
    if output.finish_reason is not None and stop == len(output.token_ids) and stop > start:
        marks[-1] = len(output.text)
    return [output.text[begin:end] for begin, end in pairwise(marks)]


def finish_word(output: CompletionOutput) -> str:
    """Return text-generation-inference's finish reason for an output."""
    if output.finish_reason is FinishReason.LENGTH:
        return "length"
    return "stop_sequence" if isinstance(output.stop_reason, str) else "eos_token"


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return exact token counts, which the original server does not have."""
    return usage.fields()


def headers(call: RequestRecord, model: LoadedModel, num_chars: int, usage: Usage) -> dict[str, str]:
    """Return the headers of a complete response. Times are in milliseconds, except `x-compute-time`, which is in
    seconds."""
    now = time.monotonic()
    submitted = call.submitted or now
    inference = now - submitted
    num_tokens = usage.completion_tokens
    return stream_headers(model, num_chars) | {
        "x-compute-time": f"{now - call.began:.6f}",
        "x-total-time": _ms(now - call.began),
        "x-validation-time": _ms(submitted - call.began),
        "x-queue-time": _ms(call.queued),
        "x-inference-time": _ms(inference - call.queued),
        "x-time-per-token": _ms((inference - call.queued) / max(num_tokens, 1)),
        "x-prompt-tokens": str(usage.prompt_tokens),
        "x-generated-tokens": str(num_tokens),
    }


def stream_headers(model: LoadedModel, num_chars: int) -> dict[str, str]:
    """Return the headers of a streamed response."""
    return {"x-compute-type": model.info.device, "x-compute-characters": str(num_chars)}


def _ms(seconds: float) -> str:
    return str(max(round(1000 * seconds), 0))


def _number(entry: Logprob | None) -> float:
    return 0.0 if entry is None else max(entry.logprob, _LOWEST)
