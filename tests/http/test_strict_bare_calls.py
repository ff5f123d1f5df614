"""Calls of strict functions without tags: a grammar enforces their schema, and does not restrict other text."""

from __future__ import annotations

import pytest

from bridle.chat.tool_parsers.formats import InferredFormat, ToolFormat, format_of
from bridle.chat.tool_parsers.grammar import Function
from bridle.chat.tool_parsers.presets import PRESETS
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_settings import ChatSettings
from tests.structured_output.kit import allows, text_vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer"}, "share": {"type": "number"}},
    "required": ["days"],
    "additionalProperties": False,
}
STRICT = [Function("f", SCHEMA, True), Function("loose", {"type": "object"}), Function("a.b/c", SCHEMA, True)]
GOOD = '{"name": "f", "arguments": {"days": 3}}'
FREE = [
    "", "Hello.", GOOD, f"```json\n{GOOD}\n```", f"  {{{GOOD}}}", f"```\n{GOOD}\n``` Done.", GOOD.replace(" ", "\n  "),
    '{"name": "a.b/c", "parameters": {"days": 3}}', '{"name": "loose", "arguments": {"x": 1}}', '{"name": "other"}',
    '{"name": "f", "arguments": {"days": 3, "share": 8.854e-12}}',
    '{"na', "```python\nf()\n```", f"Well: {GOOD}", 'So: {"name": "f", "arguments": {}}',
]  # fmt: skip
WRONG = [
    '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {"days": "3"}}', '{"name": "f"}',
    '```json\n{\n  "name": "f",\n  "arguments": {\n    "days": 3, "required": []}}',
    '{{"name":"f","arguments":{"x":1}}}',
    '{"name": "a.b/c", "arguments": {"x": 1}}',
]  # fmt: skip


def kind_of(name: str, bare_calls: bool) -> ToolFormat:
    if name == "demo":
        tokenizer = Tokenizer.load("demo")
        tokenizer.chat_settings = ChatSettings(bare_calls=bare_calls)
        return format_of(tokenizer)
    return InferredFormat(PRESETS[name], {"<|tool_call|>": 130}, bare_calls)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["demo", "qwen3_coder", "longcat", "granite"])
def test_strict_calls_without_tags_fit_their_schema(name: str) -> None:
    vocabulary = text_vocabulary()
    for bare_calls in (True, False):
        form = kind_of(name, bare_calls).may_call(STRICT)
        assert form is not None
        for text in FREE:
            assert allows(vocabulary, form.constraint(), text), text
        for text in WRONG:
            assert allows(vocabulary, form.constraint(), text) != bare_calls, text
