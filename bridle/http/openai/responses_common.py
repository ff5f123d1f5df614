"""Pieces of answers that the OpenAI routes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bridle
from bridle.outputs import CompletionOutput, FinishReason, Usage
from bridle.serving import Delta, RewindPolicy
from bridle.serving.lifecycle.generation import SubRequest
from bridle.serving.outputs.option_scores import option_scores
from bridle.serving.outputs.stream_extras import StreamExtras

#: Identifies this version of the server. Clients compare it between calls with the same seed.
SYSTEM_FINGERPRINT = f"bridle-{bridle.__version__}"

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CONTROLLER: "stop"}


def finish_reason(output: CompletionOutput, has_calls: bool = False) -> str | None:
    """Return OpenAI's name for the end of an output, which may have calls; None while the output grows."""
    if output.finish_reason is None:
        return None
    reason = _FINISH.get(output.finish_reason, "stop")
    return "tool_calls" if has_calls and reason == "stop" else reason


def usage_shape(usage: Usage, num_thinking: int = 0) -> dict[str, Any]:
    """Token counts. The details beyond OpenAI's tell how many tokens were sampled, forced, rolled back and shared.
    Accepted draft tokens are OpenAI's `prediction_tokens`, from any proposer; rejected ones are not paid for."""
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
        **usage.constraint_fields(),
    }


def options_shape(part: SubRequest) -> dict[str, Any]:
    """The probabilities of the options of a choice, as a further field of log-probabilities; nothing if options were
    not scored."""
    scores = option_scores(part.request.controller, part.collector.output)
    return {"options": [score.to_dict() for score in scores]} if scores else {}


class ChoiceIndexer:
    """Numbers of choices when outputs fork: the requested ones come first, in order of their prompts; each fork gets
    the next number when it appears."""

    def __init__(self, parts: Sequence[SubRequest], num_wanted: int) -> None:
        self._num_wanted = 1 if parts[0].is_steered else num_wanted
        self._next = len(parts) * self._num_wanted
        self._forks: dict[tuple[int, int], int] = {}

    def of(self, part: SubRequest, index: int) -> int:
        """The number of output `index` of a part."""
        if index < self._num_wanted:
            return part.number * self._num_wanted + index
        number = self._forks.get((part.number, index))
        if number is None:
            number = self._forks[part.number, index] = self._next
            self._next += 1
        return number

    def fields(self, part: SubRequest, note: StreamExtras | None) -> dict[str, Any]:
        """Logs, variables, and which choice this one was forked from."""
        if note is None:
            return {}
        origin = {} if note.parent is None or not part.is_steered else {"forked_from": self.of(part, note.parent)}
        return origin | note.fields()


def rewind_fields(delta: Delta, policy: RewindPolicy) -> dict[str, Any]:
    """Return, under `event`, how much sent text of a choice is rolled back before this chunk's text."""
    if policy is not RewindPolicy.EVENT or not (delta.taken_tokens or delta.taken_chars):
        return {}
    return {"rewind": {"tokens": delta.taken_tokens, "chars": delta.taken_chars}}
