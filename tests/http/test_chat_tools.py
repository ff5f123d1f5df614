"""Tests of tools and reasoning in chats, with the real client and the demo model. Calls are valid even if the model
prefers other tokens, and reasoning ends at its budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.http.harness import saying, scripted_model, served

CITIES = ["Rome", "Oslo", "Lima"]
WEATHER = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"],
           "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}},
]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ANSWER = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}}, "required": ["sum"],
          "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.fixture
def demo(demo_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_server + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options: Any) -> ChatCompletion:
    messages: Any = [{"role": "user", "content": text}]
    options = {"temperature": 0, "max_tokens": 120, "model": "", "seed": 1} | options
    answer: ChatCompletion = client.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    return answer


def calls_of(answer: ChatCompletion) -> list[tuple[str, Any]]:
    calls: Any = answer.choices[0].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("tools", [TOOLS, STRICT])
def test_the_model_calls_by_itself(demo: openai.OpenAI, tools: Any) -> None:
    answer = ask(demo, "What is the weather in Rome?", tools=tools)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert calls_of(answer) == [("get_weather", {"city": "Rome"})]
    assert calls_of(ask(demo, "What is the weather in Rome?", tools=tools, tool_choice="none")) == []


@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "allowed_tools", "allowed_tools": {
    "mode": "required", "tools": [NAMED]}}])  # fmt: skip
@pytest.mark.parametrize("temperature", [0, 2])
def test_a_call_can_be_demanded(demo: openai.OpenAI, choice: Any, temperature: int) -> None:
    """Every demanded call comes, whatever the prompt is and whatever tokens the model prefers."""
    for seed in range(4):
        options = {"tools": TOOLS[:1], "tool_choice": choice, "temperature": temperature, "seed": seed}
        answer = ask(demo, "Tell me a short story.", parallel_tool_calls=False, **options)
        ((name, arguments),) = calls_of(answer)
        assert name == "get_weather"
        assert list(arguments) == ["city"]
        assert arguments["city"] in CITIES
        assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("is_flat", [False, True])
def test_tools_that_are_not_listed_are_not_called(demo: openai.OpenAI, is_flat: bool) -> None:
    """All tools are shown to the model, but only the allowed tools may be called. The list of allowed tools is accepted
    in the forms of chat completions and responses."""
    for name, expected in (("get_weather", [("get_weather", {"city": "Rome"})]), ("get_time", None)):
        tools = [{"type": "function", "name": name} if is_flat else {"type": "function", "function": {"name": name}}]
        allowed = {"mode": "auto", "tools": tools}
        choice = {"type": "allowed_tools", **(allowed if is_flat else {"allowed_tools": allowed})}
        calls = calls_of(ask(demo, "What is the weather in Rome?", tools=TOOLS, tool_choice=choice))
        assert calls == expected if expected else all(called == name for called, _ in calls)


def test_several_calls_at_a_time(random_client: openai.OpenAI) -> None:
    answers = [
        ask(random_client, f"Say {number}", tools=STRICT, tool_choice="required", temperature=2, max_tokens=400)
        for number in range(12)
    ]
    messages = [choice.message for answer in answers for choice in answer.choices if choice.finish_reason != "length"]
    calls: Any = [call for message in messages for call in message.tool_calls or ()]
    assert max(len(message.tool_calls or ()) for message in messages) > 1
    assert all(json.loads(call.function.arguments)["city"] in CITIES for call in calls)
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_wants_one_call_gets_one(is_stream: bool) -> None:
    """A request for one call gets one call, even if the model decides to call by itself, and calls twice."""
    text = "".join(f'<tool_call>\n{{"name": "get_time", "arguments": {{"n": {n}}}}}\n</tool_call>\n' for n in (1, 2))
    with (
        served(scripted_model(next_token=saying(text))) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
    ):
        for parallel, number in ((True, 2), (False, 1)):
            options: Any = {"tools": TOOLS, "parallel_tool_calls": parallel, "stream": is_stream, "max_tokens": 300}
            answer: Any = ask(client, "x", **options)
            if is_stream:
                pieces = [piece for chunk in answer for piece in chunk.choices[0].delta.tool_calls or ()]
                names = [piece.function.name for piece in pieces if piece.function.name]
                first = "".join(piece.function.arguments or "" for piece in pieces if piece.index == 0)
            else:
                names = [name for name, _ in calls_of(answer)]
                first = answer.choices[0].message.tool_calls[0].function.arguments
            assert names == ["get_time"] * number and json.loads(first) == {"n": 1}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_that_a_stop_string_breaks_off_is_none(demo: openai.OpenAI, is_stream: bool) -> None:
    answer: Any = ask(demo, "What is the weather in Rome?", tools=TOOLS, stop="Rom", stream=is_stream)
    (*_, last) = answer if is_stream else [answer]
    assert last.choices[0].finish_reason == "stop"
    if not is_stream:
        assert not answer.choices[0].message.tool_calls
        assert answer.choices[0].message.content.startswith("<tool_call>")


EVIL = '<tool_call>\n{"name": "rm", "arguments": {"path": "/"}}\n</tool_call>'


def test_a_name_that_was_never_declared_is_not_called() -> None:
    """Undeclared names are not called, even if the model prefers them, or controllers and constraints replace the
    grammar of calls."""
    with (
        served(scripted_model(next_token=saying(EVIL))) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
    ):
        answer = ask(client, "x", tools=TOOLS, max_tokens=300, extra_body={"regex": "(?s:.*)"})
        assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (EVIL, None)
        held = ask(client, "x", tools=TOOLS, max_tokens=300)
        (cut,) = held.choices[0].message.tool_calls or ()  # cut off, and told so
        assert cut.function.name in {"get_weather", "get_time"}
        assert held.choices[0].finish_reason == "length"


def test_strict_arguments_hold_where_the_model_calls_by_itself(demo: openai.OpenAI) -> None:
    """The model wants to write Paris, which the schema does not allow."""
    for seed in range(4):
        answer = ask(demo, "What is the weather in Paris?", tools=STRICT, seed=seed, temperature=1)
        assert all(call[1]["city"] in CITIES for call in calls_of(answer))


def test_calls_stream_name_first(demo: openai.OpenAI) -> None:
    chunks: Any = ask(demo, "What is the weather in Rome?", tools=TOOLS, tool_choice="required", stream=True,
                      parallel_tool_calls=False)  # fmt: skip
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert pieces[0].function.name == "get_weather"
    assert pieces[0].type == "function"
    assert len(pieces[0].id) == 9
    assert {piece.index for piece in pieces} == {0}
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == {"city": "Rome"}
    assert "".join(delta.content or "" for delta in deltas) == ""


def test_the_clients_own_accumulator_reads_the_stream(demo: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    tools: Any = STRICT
    with demo.chat.completions.stream(
        model="", messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    calls: Any = final.choices[0].message.tool_calls
    assert calls[0].function.parsed_arguments == {"city": "Oslo"}


def test_results_go_back_and_are_answered(demo: openai.OpenAI) -> None:
    asked = {"role": "user", "content": "What is the weather in Rome?"}
    first = ask(demo, "What is the weather in Rome?", tools=TOOLS)
    message = first.choices[0].message
    calls: Any = message.tool_calls
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": '{"weather": "sunny"}'}
    messages: Any = [asked, message.model_dump(exclude_none=True), result]
    tools: Any = TOOLS
    answer = demo.chat.completions.create(model="", messages=messages, tools=tools, temperature=0, max_tokens=60)
    assert answer.choices[0].finish_reason == "stop"
    assert "sunny" in (answer.choices[0].message.content or "")


def test_tools_beside_a_response_format(random_client: openai.OpenAI) -> None:
    """The model writes either a call or an answer in the format. Both are valid."""
    options = {"tools": STRICT, "response_format": FORMAT, "parallel_tool_calls": False, "temperature": 2}
    kinds = set()
    for number in range(12):
        (choice,) = ask(random_client, f"What is 2 + {number}?", **options).choices
        calls: Any = choice.message.tool_calls or []
        kinds.add("call" if calls else "answer")
        if calls:
            assert json.loads(calls[0].function.arguments)["city"] in CITIES
        else:
            assert isinstance(json.loads(choice.message.content or "")["sum"], int)
    assert kinds == {"call", "answer"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice is 'required', but there are no tools"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "must be 'none', 'auto', 'required', or name a function"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "not among the tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "function.name must be a function's name"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "needs a mode"),
    ({"tools": TOOLS + TOOLS}, "tools has function 'get_weather' 2 times"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "must be an object"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "strict is 'yes'"),
    ({"tools": [{"type": "function", "function": {"name": "f" * 257}}]}, "has 257 characters; at most 256"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "strin"}}}]},
     "Invalid type"),
    ({"extra_body": {"thinking_budget": -1}}, "thinking_budget is -1; must be at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_tools_are_told(demo: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(demo, "Hello", **options)


def test_a_schema_that_cannot_be_used_is_left_out_unless_it_is_strict(demo: openai.OpenAI) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
    answer = ask(demo, "Call f", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    assert answer.choices[0].message.tool_calls
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}  # type: ignore[dict-item]
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(demo, "Call f", tools=[strict], tool_choice="required")
    assert refusal.value.param == "tools"


# -- thoughts ----------------------------------------------------------------------------------------------------


def thinking(client: openai.OpenAI, text: str = "What is 3 + 4?", **options: Any) -> Any:
    return ask(client, text, **options)


def test_thoughts_are_told_apart(demo: openai.OpenAI) -> None:
    answer = thinking(demo, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    message = answer.choices[0].message
    assert "3" in message.reasoning_content
    assert message.content == "3 + 4 = 7"
    assert "think" not in message.reasoning_content + message.content
    details = answer.usage.completion_tokens_details
    assert 3 < details.reasoning_tokens < answer.usage.completion_tokens


@pytest.mark.parametrize("field", ["thinking_budget", "reasoning"])
@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_ends_the_thoughts(demo: openai.OpenAI, field: str, budget: int) -> None:
    asked = {field: budget if field == "thinking_budget" else {"max_tokens": budget}}
    variables = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = thinking(demo, extra_body=asked | variables)
    message = answer.choices[0].message
    assert "7" in message.content
    assert "think>" not in message.content
    # The tags, the line break before the closing one, and the thoughts themselves.
    assert answer.usage.completion_tokens_details.reasoning_tokens == budget + 3
    assert answer.usage.completion_tokens_details.forced_tokens >= 2


def test_a_budget_that_is_not_used_up_changes_nothing(demo: openai.OpenAI) -> None:
    free = thinking(demo, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    bounded = thinking(demo, extra_body={"thinking_budget": 100})
    assert bounded.choices[0].message == free.choices[0].message


def test_thoughts_stream_before_the_answer(demo: openai.OpenAI) -> None:
    whole = thinking(demo, extra_body={"thinking_budget": 100}).choices[0].message
    chunks: Any = thinking(demo, stream=True, extra_body={"thinking_budget": 100})
    deltas = [chunk.choices[0].delta for chunk in chunks]
    kinds = ["thought" if hasattr(delta, "reasoning_content") else "content" for delta in deltas if delta.content or
             hasattr(delta, "reasoning_content")]  # fmt: skip
    assert kinds == sorted(kinds, reverse=True)
    assert kinds[0] == "thought"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == whole.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == whole.content


def test_after_its_thoughts_a_model_keeps_to_the_form(demo: openai.OpenAI) -> None:
    for seed in range(3):
        budget = {"thinking_budget": 6, "chat_template_kwargs": {"enable_thinking": True}}
        answer = thinking(demo, response_format=FORMAT, extra_body=budget, seed=seed, temperature=1)
        message = answer.choices[0].message
        assert list(json.loads(message.content)) == ["sum"]
        answer = thinking(demo, tools=STRICT, tool_choice="required", parallel_tool_calls=False, extra_body=budget,
                          seed=seed, temperature=1)  # fmt: skip
        assert calls_of(answer)[0][1]["city"] in CITIES


def test_a_model_without_thoughts_has_no_budget() -> None:
    with served(scripted_model()) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="writes no reasoning here"):
            ask(client, "Hello", extra_body={"thinking_budget": 5})
        assert ask(client, "Hello", extra_body={"thinking_budget": 0}, max_tokens=2).choices


def test_several_choices_each_think_within_the_budget(demo: openai.OpenAI) -> None:
    budget = {"thinking_budget": 3, "chat_template_kwargs": {"enable_thinking": True}}
    answer: Any = thinking(demo, n=3, temperature=1, extra_body=budget)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all("think>" not in choice.message.content for choice in answer.choices)
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 3 * (3 + 3)
    chunks: Any = thinking(demo, n=3, temperature=1, extra_body=budget, stream=True)
    said: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] = said.get(choice.index, "") + (choice.delta.content or "")
    assert [said[index] for index in range(3)] == [choice.message.content for choice in answer.choices]
