"""Tests that the demo model's chat template writes each kind of message."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bridle.demo import demo_model_path

TOKENIZER: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(demo_model_path())
USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return str(TOKENIZER.apply_chat_template(messages, tokenize=False, **options))


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_turn_and_the_prompt_for_the_next() -> None:
    assert render([USER], add_generation_prompt=True) == "<|bos|><|user|>Hi<|end|><|assistant|>"
    reply = {"role": "assistant", "content": "Hello!"}
    assert render([USER, reply]) == "<|bos|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_has_its_turn(role: str) -> None:
    messages = [{"role": role, "content": "Be brief."}, USER]
    assert render(messages) == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|>"


def test_tools_are_listed_in_the_system_turn() -> None:
    listed = "Tools:\n- get_weather(city: string, days: integer): Get the weather in a city.<|end|>"
    assert render([USER], tools=[WEATHER]) == f"<|bos|><|system|>{listed}<|user|>Hi<|end|>"
    with_system = render([{"role": "system", "content": "Be brief."}, USER], tools=[WEATHER])
    assert with_system == f"<|bos|><|system|>Be brief.\n{listed}<|user|>Hi<|end|>"


def test_tools_may_lack_parameters_and_descriptions() -> None:
    tools = [
        {"type": "function", "function": {"name": "now"}},
        {"name": "f", "parameters": {"properties": {"x": {}}}},
    ]
    assert "Tools:\n- now(): A tool.\n- f(x: any): A tool.<|end|>" in render([USER], tools=tools)


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'])
def test_tool_calls_and_results(arguments: Any) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "1", "content": '{"sky": "clear"}'},
    ]
    expected = '<|assistant|><tool_call>\n{"name": "f", "arguments": {"city": "Köln"}}\n</tool_call><|end|>'
    assert render(messages).endswith(expected + '<|tool|>{"sky": "clear"}<|end|>')


def test_several_calls_after_some_text() -> None:
    message = {"role": "assistant", "content": "Wait.", "tool_calls": [call({}), call({}, "g")]}
    expected = "Wait.\n" + "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("f", "g")
    )
    assert render([USER, message]).endswith(f"<|assistant|>{expected}<|end|>")


@pytest.mark.parametrize(
    "fields",
    [{"content": "4", "reasoning_content": "2 and 2"}, {"content": "<think>\n2 and 2\n</think>\n\n4"}],
    ids=["field", "inline"],
)
def test_thoughts_are_kept_in_the_last_turn_and_dropped_from_earlier_ones(fields: dict[str, str]) -> None:
    thought = {"role": "assistant", **fields}
    assert render([USER, thought]).endswith("<|assistant|><think>\n2 and 2\n</think>\n\n4<|end|>")
    assert "2 and 2" not in render([USER, thought, USER])


def test_thinking_is_asked_for_in_the_system_turn() -> None:
    hint = "Think before you answer."
    assert render([USER], enable_thinking=True) == f"<|bos|><|system|>{hint}<|end|><|user|>Hi<|end|>"
    assert render([USER], enable_thinking=False) == render([USER])


def test_content_in_parts_renders_as_one_text() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert render([{"role": "user", "content": parts}]) == render([USER])


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(Exception, match="The role wizard is none of"):
        render([{"role": "wizard", "content": "Hi"}])
