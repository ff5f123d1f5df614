"""Checks with the real LiteLLM; the argument is a server's address."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
url = sys.argv[1]
#: The ways by which it reaches a server of one's own.
WAYS = {
    "openai/demo": {"api_base": url + "/v1"},
    "hosted_vllm/demo": {"api_base": url + "/v1"},
    "litellm_proxy/demo": {"api_base": url + "/v1"},
    "llamafile/demo": {"api_base": url + "/v1"},
    "lm_studio/demo": {"api_base": url + "/v1"},
    "anthropic/demo": {"api_base": url},
}
SAY = [{"role": "user", "content": "Is snow white?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def ask(way: str, messages=SAY, **fields):
    usual = {"temperature": 0, "max_tokens": 80, "api_key": "none", "num_retries": 0, "max_retries": 0}
    return litellm.completion(way, messages, **(usual | WAYS[way] | fields))


def check_chat() -> None:
    for way in WAYS:
        answer = ask(way)
        assert answer.choices[0].message.content.startswith("Yes"), (way, answer)
        assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 0, (way, answer)
        chunks = list(ask(way, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content, (way, text)
        built = litellm.stream_chunk_builder(chunks, messages=SAY)
        assert built.usage.completion_tokens == answer.usage.completion_tokens, (way, built)
        assert built.choices[0].finish_reason == "stop", (way, built)


def check_tools() -> None:
    for way in WAYS:
        for choice in ("required", "auto", {"type": "function", "function": {"name": "get_weather"}}):
            message = ask(way, WEATHER, tools=TOOLS, tool_choice=choice).choices[0].message
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Rome"}, (way, choice, message)
        built = litellm.stream_chunk_builder(list(ask(way, WEATHER, tools=TOOLS, tool_choice="required", stream=True)))
        (streamed,) = built.choices[0].message.tool_calls
        assert json.loads(streamed.function.arguments) == {"city": "Rome"}, (way, built)
        told = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        answer = ask(way, [*WEATHER, message.model_dump(), told], tools=TOOLS)
        assert "sunny" in answer.choices[0].message.content, (way, answer)


def check_structure() -> None:
    about = [{"role": "user", "content": "Tell me about a person."}]
    for way in WAYS:
        answer = ask(way, about, response_format=Person)
        assert Person.model_validate_json(answer.choices[0].message.content), (way, answer)
        if way != "anthropic/demo":
            number = ask(way, about, extra_body={"regex": "[0-9]{3}"})
            assert number.choices[0].message.content.isdigit(), (way, number)
    mode = ask("openai/demo", about, response_format={"type": "json_object"})
    assert json.loads(mode.choices[0].message.content) is not None


def check_completions() -> None:
    for way in ("text-completion-openai/demo", "hosted_vllm/demo"):
        fields = {"api_base": url + "/v1", "api_key": "none", "temperature": 0, "max_tokens": 8}
        answer = litellm.text_completion(model=way, prompt="The capital of France is", **fields)
        if way.startswith("text"):
            assert answer.choices[0].text == " Paris.", (way, answer)
            chunks = litellm.text_completion(model=way, prompt="The capital of France is", stream=True, **fields)
            assert "".join(chunk.choices[0].text or "" for chunk in chunks) == " Paris."
        assert answer.usage.completion_tokens > 0


def check_text_generation_inference() -> None:
    fields = {"api_base": url, "api_key": "none", "temperature": 0.01, "max_tokens": 20}
    answer = litellm.completion("huggingface/tgi", SAY, **fields)
    assert answer.choices[0].message.content.startswith("Yes"), answer
    chunks = litellm.completion("huggingface/tgi", SAY, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).startswith("Yes")


def check_responses() -> None:
    fields = {"api_base": url + "/v1", "api_key": "none", "temperature": 0, "max_output_tokens": 40}
    answer = litellm.responses(input="Is snow white?", model="openai/demo", **fields)
    assert answer.output[0].content[0].text.startswith("Yes"), answer
    events = [
        event.type for event in litellm.responses(input="Is snow white?", model="openai/demo", stream=True, **fields)
    ]
    assert events[0] == "response.created" and events[-1] == "response.completed", events


def check_async_client() -> None:
    async def several() -> list[str]:
        asks = [
            litellm.acompletion(way, SAY, temperature=0, max_tokens=20, api_key="none", **WAYS[way]) for way in WAYS
        ]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*asks)]

    assert all(text.startswith("Yes") for text in asyncio.run(several()))


def check_errors() -> None:
    for way in WAYS:
        for fields, kind in (
            ({"temperature": -1.0}, litellm.BadRequestError),
            ({"stop": [""] * 99}, litellm.BadRequestError),
        ):
            for stream in (False, True):
                try:
                    answer = ask(way, stream=stream, **fields)
                    list(answer if stream else ())
                except kind:
                    continue
                raise AssertionError(f"{way}: {fields} was not refused: {answer}")
    try:
        litellm.completion("openai/nobody", SAY, api_base=url + "/v1", api_key="none", max_retries=0)
    except litellm.NotFoundError as error:
        assert "nobody" in str(error)
    else:
        raise AssertionError("an unknown model answered")


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok", flush=True)
