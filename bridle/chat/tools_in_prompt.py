"""Tools that the model's chat template leaves out: described in the prompt, or refused (`tokenizer/tool_prompt.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridle.chat.tool_parsers.formats import is_hermes
from bridle.errors import UnsupportedFeature
from bridle.serving import LoadedModel
from bridle.tokenizer.chat_settings import ToolPrompt
from bridle.tokenizer.chat_template import Prepared
from bridle.tokenizer.tool_prompt import described, support_of

Tools = Sequence[Mapping[str, Any]]


def with_tools(
    model: LoadedModel, messages: Prepared, tools: Tools | None, wanted: ToolPrompt | None
) -> tuple[Prepared, Tools | None]:
    """Return messages and tools of which the template writes all. `wanted` is what the request says of tools that it
    would leave out (None: as the operator says). Raises `UnsupportedFeature` if they are to be refused."""
    tokenizer = model.tokenizer
    if tools and not support_of(tokenizer).tools and (wanted or tokenizer.chat_settings.tool_prompt) == "refuse":
        raise UnsupportedFeature(
            f"tools: the chat template of {model.name!r} does not write them; leave tools out, or set tool_prompt to "
            "'describe'",
            "tools",
        )
    explains = not tools or is_hermes(tokenizer)
    return described(tokenizer, messages, tools, explains)
