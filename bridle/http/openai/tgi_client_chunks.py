"""Converts chat chunks to the format that `text-generation`, the client library of text-generation-inference, reads.

The client library requires a role and `tool_calls` (one object or null) in every delta. The client parses every line of
data as a chunk, so the line `[DONE]` makes it fail. OpenAI's clients join repeated roles, and need the line `[DONE]`.
So only requests that look like those of the `text-generation` client get this format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridle.http.openai.schemas import ChatBody

#: The client sends all `NATIVE_FIELDS` in every body, null or not, with this model name.
_MODEL = "tgi"
NATIVE_FIELDS = frozenset(
    {
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "max_tokens",
        "n",
        "seed",
        "temperature",
        "top_p",
        "tools",
        "tool_choice",
    }
)


def is_native_client(body: ChatBody) -> bool:
    """Return whether the request body looks like one from the `text-generation` client."""
    return body.model == _MODEL and body.model_fields_set >= NATIVE_FIELDS


def native_chunks() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that converts the OpenAI chunks of one stream to the client's format."""
    ids: dict[tuple[int, int], str] = {}  # ids of calls, by choice and number: only a call's first chunk has its id

    def convert(chunk: dict[str, Any]) -> dict[str, Any]:
        for choice in chunk["choices"]:
            delta: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": None} | choice["delta"]
            if delta["tool_calls"]:
                (call,) = delta["tool_calls"]
                known = ids.setdefault((choice["index"], call["index"]), call.get("id", ""))
                function = {"name": None} | call["function"]
                delta["tool_calls"] = {"type": "function"} | call | {"id": known, "function": function}
            choice["delta"] = delta
        return chunk

    return convert
