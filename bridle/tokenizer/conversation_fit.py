"""A conversation in the form that the model's chat template takes, for chats of all APIs and for those of scripts.

Roles follow the template's rules (`roles.py`). Tools, calls and answers that the template leaves out are described in
the messages (`tool_prompt.py`), or the tools are refused. Knows no readers of calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bridle.errors import UnsupportedFeature
from bridle.tokenizer.chat_settings import ToolPrompt
from bridle.tokenizer.chat_template import Prepared
from bridle.tokenizer.roles import fitted, rules_of
from bridle.tokenizer.tool_prompt import described, support_of

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]


def fit_template(
    tokenizer: Tokenizer,
    messages: Prepared,
    tools: Tools | None,
    tool_prompt: ToolPrompt | None = None,
    explains: bool = True,
) -> tuple[Prepared, Tools | None]:
    """Return prepared messages and tools of which the template writes all. `tool_prompt` replaces the operator's
    setting. Unless it `explains`, tools are listed without a form of calls. Raises `UnsupportedFeature` for tools that
    are to be refused. Slow the first time for a template."""
    rules = rules_of(tokenizer.chat_template)
    messages = fitted(messages, rules)
    if not tools and not any("tool_calls" in each or each["role"] == "tool" for each in messages):
        return messages, tools
    if tools and (tool_prompt or tokenizer.chat_settings.tool_prompt) == "refuse" and not support_of(tokenizer).tools:
        raise UnsupportedFeature(
            "tools: the model's chat template does not write them; leave tools out, or set tool_prompt to 'describe'",
            "tools",
        )
    messages, tools = described(tokenizer, messages, tools, explains)
    return fitted(messages, rules), tools  # a description may be in a role that the template refuses
