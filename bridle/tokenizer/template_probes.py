"""Renders a chat template with made-up tool calls, from which the format of calls is inferred.

Each probe gives the text of one assistant turn: the template's text after the user message. Names, keys and values are
words that occur in no template, so that every occurrence in the text comes from the probe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bridle.errors import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    from bridle.tokenizer.chat_template import ChatTemplate

USER = "zquestion"
CONTENT = "zanswer"
THOUGHT = "zthought"
NAMES = ("zfirst", "zsecond", "zthird")
KEYS = ("zkeya", "zkeyb")
IDS = ("zcallid00", "zcallid01", "zcallid02")
#: A value of each JSON type. The string is also a word that occurs in no template.
SAMPLES: dict[str, Any] = {
    "string": "zvala",
    "integer": 73519,
    "number": 73.519,
    "boolean": True,
    "object": {"zinner": "zvalc"},
    "array": ["zvald"],
}


class RenderChat(Protocol):
    """Renders messages with a chat template. Raises `InvalidRequest` if the template fails."""

    def __call__(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        raise NotImplementedError


def renderer_of(template: ChatTemplate) -> RenderChat:
    """Return a function that renders messages with a template."""

    def render(
        messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        return template.render(messages, tools, None, {}, add_generation_prompt)

    return render


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A call in a probe: the number of the function, and the call's arguments."""

    number: int
    arguments: Mapping[str, Any]


def tool(name: str) -> dict[str, Any]:
    """Return a tool that accepts every type of argument."""
    properties = {key: {"type": "string", "description": "d"} for key in KEYS}
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


TOOLS = [tool(name) for name in NAMES]


@dataclass(frozen=True, slots=True)
class Prober:
    """Renders assistant turns. Some templates need the arguments as text (`is_text`), or null content in a message with
    calls (`is_null`)."""

    render: RenderChat
    is_text: bool = False
    is_null: bool = False

    def turn(self, calls: Sequence[ProbeCall] = (), content: str = "", thought: str = "") -> str | None:
        """Return the text of an assistant turn after the user message; None if the template refuses it."""
        message = self.message(calls, content)
        if thought:
            message |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
        return self._behind_user([message], add_generation_prompt=False)

    def message(self, calls: Sequence[ProbeCall], content: str = "") -> dict[str, Any]:
        """Return an assistant message with calls."""
        is_null = self.is_null and calls and not content
        message: dict[str, Any] = {"role": "assistant", "content": None if is_null else content}
        if calls:
            message["tool_calls"] = [self._call(number, each) for number, each in enumerate(calls)]
        return message

    def generation_prompt(self) -> str | None:
        """Return the text that begins the assistant's turn, after the user message."""
        return self._behind_user([], add_generation_prompt=True)

    def _behind_user(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str | None:
        try:
            text = self.render([{"role": "user", "content": USER}, *messages], TOOLS, add_generation_prompt)
        except (InvalidRequest, UnsupportedModel):
            return None
        return text.rpartition(USER)[2] if USER in text else None

    def _call(self, number: int, call: ProbeCall) -> dict[str, Any]:
        arguments: Any = json.dumps(call.arguments, ensure_ascii=False) if self.is_text else dict(call.arguments)
        function = {"name": NAMES[call.number], "arguments": arguments}
        return {"id": IDS[number], "type": "function", "function": function}


def prober_of(render: RenderChat) -> Prober | None:
    """Return a prober with the format of arguments that the template accepts; None if the template writes no calls."""
    call = ProbeCall(0, {KEYS[0]: SAMPLES["string"]})
    for is_text, is_null in ((False, False), (True, False), (False, True), (True, True)):
        prober = Prober(render, is_text, is_null)
        text = prober.turn([call])
        if text is not None and NAMES[0] in text and SAMPLES["string"] in text:
            return prober
    return None
