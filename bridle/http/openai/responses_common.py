"""Builds parts of responses that several OpenAI routes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bridle
from bridle.outputs import CompletionOutput, FinishReason, Usage
from bridle.serving import Delta, RewindPolicy
from bridle.serving.lifecycle.generation import SubRequest
from bridle.serving.outputs.option_scores import option_scores
from bridle.serving.outputs.stream_extras import StreamExtras

#: Identifies this version of the server. Clients compare the value between calls with the same seed.
SYSTEM_FINGERPRINT = f"bridle-{bridle.__version__}"

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CONTROLLER: "stop"}


def finish_reason(output: CompletionOutput, has_calls: bool = False) -> str | None:
    """Return OpenAI's finish reason for an output; None if the output has not ended."""
    if output.finish_reason is None:
        return None
    reason = _FINISH.get(output.finish_reason, "stop")
    return "tool_calls" if has_calls and reason == "stop" else reason


def usage_shape(usage: Usage, num_thinking: int = 0) -> dict[str, Any]:
    """Return token counts in OpenAI's format, with additional counts of sampled, forced, rolled back and shared tokens.
    `accepted_prediction_tokens` counts accepted draft tokens from all sources; rejected draft tokens are not billed."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": num_thinking,
            **usage.predictions(),
            "sampled_tokens": usage.sampled_tokens,
            "forced_tokens": usage.forced_tokens,
            "rewound_tokens": usage.rewound_tokens,
            "shared_tokens": usage.shared_tokens,
            **({"spared_tokens": usage.spared_tokens} if usage.spared_tokens else {}),
        },
        **({} if usage.constraint is None else usage.constraint_fields()),
    }


def options_shape(part: SubRequest) -> dict[str, Any]:
    """Return a field of the log-probabilities with the probabilities of a `choice` constraint's options; empty if the
    options were not scored."""
    scores = option_scores(part.request.controller, part.collector.output)
    return {"options": [score.to_dict() for score in scores]} if scores else {}


class ChoiceIndexer:
    """Numbers the choices of a request. The requested choices come first, in the order of their prompts. Each fork of
    an output gets the next free number when the fork begins."""

    def __init__(self, parts: Sequence[SubRequest], num_wanted: int) -> None:
        self._num_wanted = 1 if parts[0].is_steered else num_wanted
        self._next = len(parts) * self._num_wanted
        self._forks: dict[tuple[int, int], int] = {}

    def of(self, part: SubRequest, index: int) -> int:
        """Return the number of the choice for output `index` of a sub-request."""
        if index < self._num_wanted:
            return part.number * self._num_wanted + index
        number = self._forks.get((part.number, index))
        if number is None:
            number = self._forks[part.number, index] = self._next
            self._next += 1
        return number

    def fields(self, part: SubRequest, note: StreamExtras | None) -> dict[str, Any]:
        """Return the response fields with logs and variables of controllers, and the number of the choice from which
        this choice was forked."""
        if note is None:
            return {}
        origin = {} if note.parent is None or not part.is_steered else {"forked_from": self.of(part, note.parent)}
        return origin | note.fields()


def rewind_fields(delta: Delta, policy: RewindPolicy) -> dict[str, Any]:
    """Return the fields that say how much sent text is rolled back before this chunk's text, if the rewind policy is
    `event`."""
    if policy is not RewindPolicy.EVENT or not (delta.taken_tokens or delta.taken_chars):
        return {}
    return {"rewind": {"tokens": delta.taken_tokens, "chars": delta.taken_chars}}
