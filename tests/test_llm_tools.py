"""Tests of tools and thoughts in the Python API: calls and thoughts are separated like on the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from bridle import LLM, ChatSession, Controller, Decision, SamplingParams, SequenceView, ToolCall
from bridle.chat.stream_deltas import CallArguments, Content, Thought, ToolCallStart
from bridle.errors import InvalidRequest, UnsupportedFeature
from tests.http.harness import local_client, saying, scripted_model

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=120)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_blocks=256, sampling=GREEDY) as loaded:
        yield loaded


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


def test_a_call_is_told_apart(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, tools=TOOLS)
    assert output.message is not None
    assert calls_of(output.message) == [("get_weather", {"city": "Rome"})]
    assert output.message.content == "" and "get_weather" in output.text


def test_a_prompt_does_not_show_that_a_function_is_strict(llm: LLM) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    shown = "{{ tools | tojson }}{{ messages[0].content }}"
    (plain,), (other,) = (llm.chat(QUESTION, tools=tools, chat_template=shown) for tools in (TOOLS, strict))
    assert other.prompt_token_ids == plain.prompt_token_ids


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_call_can_be_demanded(llm: LLM, choice: str) -> None:
    sampling = GREEDY.with_(temperature=2.0, seed=3)
    (output,) = llm.chat([{"role": "user", "content": "Tell me a story."}], sampling, tools=TOOLS, tool_choice=choice)
    assert output.message is not None
    assert {name for name, _ in calls_of(output.message)} == {"get_weather"}
    assert all(arguments["city"] in ("Rome", "Oslo") for _, arguments in calls_of(output.message))


class Hearing(Controller):
    """A controller that changes nothing."""

    max_rewind = 0


class Without(Hearing):
    """A controller that forbids some tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample(bias=[(token, -float("inf")) for token in self.tokens])


@pytest.mark.parametrize("options", [{"tool_choice": "required"}, {"thinking_budget": 20}])
def test_a_controller_beside_calls_and_thoughts(llm: LLM, options: Any) -> None:
    (alone,) = llm.chat(QUESTION, tools=TOOLS, **options)
    (beside,) = llm.chat(QUESTION, tools=TOOLS, controller=Hearing(), **options)
    assert beside.text == alone.text and beside.message is not None and alone.message is not None
    assert calls_of(beside.message) == calls_of(alone.message) and beside.message.thoughts == alone.message.thoughts


def test_a_controller_has_a_say_in_a_call(llm: LLM) -> None:
    size = llm.tokenizer.vocab_size
    letters = [token for token in range(size) if "R" in llm.tokenizer.token_text(token)]
    (output,) = llm.chat(QUESTION, tools=TOOLS, tool_choice="required", controllers=[Hearing(), Without(letters)])
    assert output.message is not None
    assert calls_of(output.message)[0] == ("get_weather", {"city": "Oslo"})


def test_a_choice_without_tools_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="there are no tools"):
        llm.chat(QUESTION, tool_choice="required")
    with pytest.raises(InvalidRequest, match="thinking_budget is -1"):
        llm.chat(QUESTION, thinking_budget=-1)
    scripted = LLM(scripted_model(next_token=saying("x")))
    with scripted, pytest.raises(UnsupportedFeature, match="writes no reasoning"):
        scripted.chat(QUESTION, thinking_budget=4)


def test_thoughts_end_with_their_budget(llm: LLM) -> None:
    long, short = (llm.chat(QUESTION, thinking_budget=budget)[0] for budget in (60, 3))
    assert long.message is not None and short.message is not None
    assert long.message.thoughts.startswith(short.message.thoughts) and short.message.thoughts
    assert len(short.message.thoughts) < len(long.message.thoughts)
    assert "think>" not in long.message.content + short.message.content


@pytest.mark.parametrize("options", [{"tools": TOOLS}, {"tools": TOOLS, "thinking_budget": 20}, {}])
def test_the_server_says_the_same(llm: LLM, options: Any) -> None:
    """The Python API returns the same text, thoughts and calls as the server."""
    (ours,) = llm.chat(QUESTION, **options)
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": GREEDY.max_tokens, **options}
    model = llm.model
    close, model.shutdown = model.shutdown, lambda drain: None  # the client ends with its registry, not this model
    try:
        with local_client(model) as client:
            theirs = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    finally:
        model.shutdown = close
    assert ours.message is not None
    assert (theirs.get("reasoning_content") or "") == ours.message.thoughts
    assert (theirs["content"] or "") == ours.message.content
    told = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in theirs.get("tool_calls") or ()
    ]
    assert told == calls_of(ours.message)


def test_a_session_calls_and_hears_the_result(llm: LLM) -> None:
    session = llm.session(tools=TOOLS)
    assert session.send(QUESTION[0]["content"]) == ""
    assert session.last_output is not None and session.last_output.message is not None
    (call,) = session.last_output.message.calls
    assert session.turns[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": call.arguments}
    answer = session.send([{"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}])
    assert [turn["role"] for turn in session.turns] == ["user", "assistant", "tool", "assistant"]
    assert session.turns[3]["content"] == answer != ""
    assert ChatSession.from_dict(llm, session.to_dict()).options["tools"] == TOOLS
    session.undo()
    assert session.turns == []


def test_a_session_streams_its_pieces() -> None:
    with LLM(scripted_model(next_token=saying(f"Well: {CALL}")), sampling=GREEDY) as llm:
        stream = llm.session(tools=TOOLS).stream("x")
        pieces = list(stream.pieces())
        assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == "Well: "
        assert [piece.name for piece in pieces if isinstance(piece, ToolCallStart)] == ["get_weather"]
        told = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
        assert json.loads(told) == {"city": "Rome"} and not any(isinstance(piece, Thought) for piece in pieces)
        assert stream.output.message is not None
        assert stream.output.message.calls == [ToolCall("get_weather", stream.output.message.calls[0].id, told)]
        assert stream.read() == "Well: "

        async def ask() -> list[str]:
            sessions = [llm.session(tools=TOOLS) for _ in range(2)]
            return [await sessions[0].send_async("x"), sessions[1].stream("x").read()]

        assert asyncio.run(ask()) == ["Well: ", "Well: "]
        assert ChatSession.together([llm.session(tools=TOOLS)], ["x"]) == ["Well: "]


def test_tools_of_another_shape_are_for_the_template_alone() -> None:
    with LLM(scripted_model(next_token=saying(CALL)), sampling=GREEDY) as llm:
        (output,) = llm.chat(QUESTION, tools=[{"name": "f"}], chat_template="{{ tools[0].name }}:")
        assert llm.tokenizer.decode(output.prompt_token_ids) == "f:"
        assert output.message is not None and not output.message.calls and output.message.content == CALL
