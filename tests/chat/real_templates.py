"""Chat templates of real models, as far as this machine has them, and the tool calls that they write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bridle.chat.tool_parsers.call_format import CallFormat
from bridle.chat.tool_parsers.inference import infer_format
from bridle.errors import InvalidRequest
from bridle.tokenizer.chat_template import ChatTemplate
from bridle.tokenizer.template_probes import Prober, prober_of, renderer_of

#: A folder of Jinja files: `models/templates` of the source distribution of `llama-cpp-python`, for example.
VARIABLE = "BRIDLE_CHAT_TEMPLATES"
END = "<EOS>"
NAMES = ("get_weather", "book")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "kind": {"type": "string", "enum": ["day", "week end"]},
        "on": {"type": "boolean"},
        "where": {
            "type": "object",
            "properties": {"street": {"type": "string"}},
            "additionalProperties": {"type": "string"},
        },
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
for described in PARAMETERS["properties"].values():
    described["description"] = "d"  # which one template needs
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}} for name in NAMES
]


def files() -> list[Path]:
    folder = os.environ.get(VARIABLE)
    return sorted(Path(folder).glob("*.jinja")) if folder else []


class RealTemplate:
    """A template, the tool call format that is inferred from it, and the calls that it writes."""

    def __init__(self, file: Path) -> None:
        self.name = file.stem
        self.template = ChatTemplate(file.read_text(encoding="utf-8"), {"bos_token": "<BOS>", "eos_token": END})
        self.render = renderer_of(self.template)
        self.prober: Prober | None = prober_of(self.render)
        self.form: CallFormat | None = infer_format(self.render, (END,))

    def calls(self, calls: Sequence[Mapping[str, Any]], content: str = "") -> str | None:
        """Return what the template writes for calls after the user's message, including the ends of turns; None if it
        refuses the calls. The calls use the two functions in turn."""
        assert self.prober is not None
        made = [
            {"id": f"callid00{number}", "type": "function", "function": {"name": NAMES[number % 2], "arguments":
             json.dumps(each, ensure_ascii=False) if self.prober.is_text else dict(each)}}
            for number, each in enumerate(calls)
        ]  # fmt: skip
        given = None if self.prober.is_null and not content else content
        turn = {"role": "assistant", "content": given, "tool_calls": made}
        try:
            text = self.render([{"role": "user", "content": "zquestion"}, turn], TOOLS, False)
        except InvalidRequest:
            return None
        return text.rpartition("zquestion")[2]


@cache
def real_template(file: Path) -> RealTemplate:
    return RealTemplate(file)
