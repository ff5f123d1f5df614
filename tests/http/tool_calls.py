"""A model that calls tools, and readers of its output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from bridle import Controller, Decision
from bridle.controller_tools import Call
from bridle.controllers import SequenceView
from bridle.tokenizer import Tokenizer
from tests.http.harness import tokenizer_folder
from tests.leftovers import kept_folder

BLOCK = 16
USER = "{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% else %}"
END = "</s>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BEGIN = "{% for m in messages %}" + USER + "<|im_start|>assistant\n{{ m.content }}"
# Templates that write calls otherwise than models do.
CALLS = "{% for c in m.tool_calls or () %}"
NAME, ARGUMENTS = '"{{ c.function.name }}"', "{{ c.function.arguments | tojson }}"
HERMES = BEGIN + CALLS + '<tool_call>{"name":' + NAME + ',"arguments":' + ARGUMENTS + "}</tool_call>{% endfor %}" + END
TAGGED = '<tool_call>\n{"name": "find", "arguments": {"city": "Rome", "day": 1}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "integer"}}}
QUESTION = "Where is it, and what is there, and when did they build it, and who? " * 4


@cache
def a_tokenizer(template: str) -> Tokenizer:
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder())
    special = ["<|im_start|>", "<|im_end|>", *(["[TOOL_CALLS]"] if "[TOOL_CALLS]" in template else [])]
    fast.add_special_tokens({"additional_special_tokens": special})
    if "<think>" in template:
        fast.add_tokens(["<think>", "</think>"])
    fast.chat_template = template
    folder = kept_folder("bridle-http-tests-")
    fast.save_pretrained(folder)
    return Tokenizer.load(folder)


def events_of(answer: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


CITIES = ["Rome", "Oslo", "Lima"]
WEATHER = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"],
           "additionalProperties": False}  # fmt: skip
TOOLS = [{"name": "get_weather", "description": "Weather of a city.", "input_schema": WEATHER}]


class Says(Controller):
    """A controller that writes a tool's result or error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.call: Call | None = None

    def next(self, view: SequenceView) -> Decision:
        if view.generated:
            return Decision.stop()
        if self.call is None:
            self.call = view.tool(self.name)
        if not self.call.is_done:
            return Decision.wait_for(self.call)
        return Decision.splice(0, view.encode("refused" if self.call.error else self.call.text))


def told(lines: Iterator[str]) -> tuple[str, dict[str, Any]]:
    """Return the id and the content of the next tool call in a stream."""
    for line in lines:
        found = re.search(r"tool_call:([\w-]+)", line)
        if found is not None:
            value = re.search(r'"value": ?"([0-9a-f]+)"', line)
            assert value is not None
            return found[1], json.loads(bytes.fromhex(value[1]))
    raise AssertionError("the stream ended without telling of a call")
