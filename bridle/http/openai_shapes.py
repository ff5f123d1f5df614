"""Pieces that both OpenAI routes put into their answers."""

from __future__ import annotations

from typing import Any

from bridle.outputs import CompletionOutput, FinishReason, Usage

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CONTROLLER: "stop"}


def finish_reason(output: CompletionOutput) -> str | None:
    """OpenAI's word for how an output ended; None while it grows."""
    return None if output.finish_reason is None else _FINISH.get(output.finish_reason, "stop")


def usage_shape(usage: Usage) -> dict[str, Any]:
    """Token counts. The details beyond OpenAI's tell what was sampled, forced, taken back and shared."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "sampled_tokens": usage.sampled_tokens,
            "forced_tokens": usage.forced_tokens,
            "rewound_tokens": usage.rewound_tokens,
            "shared_tokens": usage.shared_tokens,
        },
    }
