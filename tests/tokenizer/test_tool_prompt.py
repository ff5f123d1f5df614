"""Tests of start tokens in prompts, and of messages that describe tools or calls that a chat template leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_template import ChatTemplate, prepare
from bridle.tokenizer.start_tokens import start_tokens
from bridle.tokenizer.tool_prompt import described, support_of
from tests.http.harness import tokenizer_folder
from tests.tokenizer.templates import NO_SYSTEM, PLAIN, TOOLS_TOLD, a_tokenizer

CALLS_TOLD = PLAIN.replace("{% endfor %}", "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}")
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": '{"in": "Rome"}'}}
USER = {"role": "user", "content": "When?"}
TURNS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "noon"},
    {"role": "tool", "tool_call_id": "call00001", "content": "night"},
]


@pytest.mark.parametrize(
    ("template", "tools", "calls", "system"),
    [(PLAIN, False, False, True), (NO_SYSTEM, False, False, False), (TOOLS_TOLD, True, True, True),
     (CALLS_TOLD, False, True, True)],
)  # fmt: skip
def test_a_template_shows_what_it_writes(template: str, tools: bool, calls: bool, system: bool) -> None:
    found = support_of(a_tokenizer(template))
    assert (found.tools, found.calls, found.system) == (tools, calls, system)


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM])
@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "Be brief."}]])
def test_what_is_left_out_is_described(template: str, first: list[dict[str, Any]]) -> None:
    messages, tools = described(a_tokenizer(template), prepare([*first, *TURNS]), [TOOL])
    assert tools is None
    place = messages[0] if template is PLAIN else next(each for each in messages if each["role"] == "user")
    assert json.dumps(TOOL) in place["content"] and '{"name": <function-name>' in place["content"]
    assert ("Be brief." in messages[0]["content"]) == bool(first)
    *_, called, answers = messages
    assert called["content"].count('<tool_call>\n{"name": "now", "arguments": {"in": "Rome"}}\n</tool_call>') == 2
    assert answers["role"] == "user"
    assert answers["content"] == "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nnight\n</tool_response>"


def test_what_a_template_writes_stays() -> None:
    said = prepare(TURNS)
    assert described(a_tokenizer(TOOLS_TOLD), said, [TOOL]) == (said, [TOOL])
    assert described(a_tokenizer(PLAIN), prepare([USER]), None) == (prepare([USER]), None)
    messages, _ = described(a_tokenizer(CALLS_TOLD), said, None)
    assert messages[1] == said[1] and messages[2]["role"] == "user"
    assert "<function-name>" not in described(a_tokenizer(PLAIN), said, [TOOL], explains=False)[0][0]["content"]


class Bos(Tokenizer):
    """A tokenizer that has a start token but does not put it before texts."""

    def __init__(self, template: str, bos: str) -> None:
        made = Tokenizer.load(tokenizer_folder())
        self.__dict__.update(made.__dict__)
        self.chat_template = ChatTemplate(template, {})
        self.bos_token_id = made.id_of(bos)


MARKED = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(("template", "is_mark"), [(MARKED, True), (PLAIN, False), ("", False)])
def test_a_text_does_not_begin_with_a_mark_of_the_template(template: str, is_mark: bool) -> None:
    text = Bos(template, "<|im_start|>")
    assert text.encode("") == []
    begun = start_tokens(text)
    assert (begun == (text.id_of("<|im_start|>"),)) != is_mark
    assert begun and text.id_of("<|im_start|>") is not None
