"""The chunks of a chat in the form that text-generation, the client of text-generation-inference, reads.

It requires a role and `tool_calls` (one object or null) in every delta. It reads every line of data as a chunk, so it
fails at the last line of OpenAI's streams. OpenAI's own clients join repeated roles, and need that line. So only a
client whose bodies look like text-generation's gets these chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridle.http.openai.schemas import ChatBody

#: Fields that it sends in every body, null or not, with this as the model.
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
    """Return whether the text-generation client wrote this body."""
    return body.model == _MODEL and body.model_fields_set >= NATIVE_FIELDS


def native_chunks() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that converts OpenAI's chunks of one stream to those that it reads."""
    ids: dict[tuple[int, int], str] = {}  # ids of calls, by choice and number: only the first chunk has it

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
