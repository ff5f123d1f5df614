"""Checks with the real `huggingface_hub` client; the argument is a server's address."""

import asyncio
import json
import sys

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

url = sys.argv[1]
client = InferenceClient(model=url, token="none")
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "Is snow white?"}]


def check_text() -> None:
    assert client.text_generation(PROMPT, max_new_tokens=8) == PROMPT + " Paris."
    assert client.text_generation(PROMPT, max_new_tokens=8, return_full_text=False) == " Paris."
    answer = client.text_generation(PROMPT, max_new_tokens=8, details=True, decoder_input_details=True, top_n_tokens=2)
    assert answer.details.finish_reason == "eos_token" and answer.details.prefill and answer.details.tokens


def check_adapter() -> None:
    plain = client.text_generation(PROMPT, max_new_tokens=8)
    other = client.text_generation(PROMPT, max_new_tokens=8, adapter_id="pirate")
    assert other.startswith(PROMPT) and other != plain
    assert client.text_generation(PROMPT, max_new_tokens=8, adapter_id="demo") == plain
    pieces = list(client.text_generation(PROMPT, max_new_tokens=8, adapter_id="pirate", stream=True))
    assert PROMPT + "".join(pieces) == other
    named = InferenceClient(base_url=url + "/v1", token="none")
    assert named.chat_completion(QUESTION, model="pirate", max_tokens=8, temperature=0.0).model == "pirate"


def check_stream() -> None:
    pieces = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True))
    assert "".join(pieces).startswith(" Paris.")
    events = list(client.text_generation(PROMPT, max_new_tokens=2, stream=True, details=True))
    assert events[-1].details.finish_reason == "length" and events[-1].generated_text


def check_chat() -> None:
    answer = client.chat_completion(QUESTION, max_tokens=10, seed=1, temperature=0.0)
    assert answer.choices[0].message.content.startswith("Yes") and answer.usage.completion_tokens > 0
    chunks = client.chat_completion(QUESTION, max_tokens=10, stream=True, temperature=0.0)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices).startswith("Yes")
    other = InferenceClient(base_url=url + "/v1", token="none")
    assert other.chat.completions.create(model="demo", messages=QUESTION, max_tokens=10).choices


def check_stop_and_seed() -> None:
    cut = client.text_generation(
        "Once upon a time", max_new_tokens=60, stop=["."], details=True, return_full_text=False
    )
    assert cut.details.finish_reason == "stop_sequence" and cut.generated_text.count(".") == 1
    drawn = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.9, "seed": 3, "details": True}
    first, again = (client.text_generation("Once upon a time", **drawn) for _ in range(2))
    assert first.generated_text == again.generated_text and first.details.seed == 3
    chats = [client.chat_completion(QUESTION, max_tokens=20, seed=3, temperature=1.0, n=2) for _ in range(2)]
    texts = [[choice.message.content for choice in chat.choices] for chat in chats]
    assert texts[0] == texts[1] and len(texts[0]) == 2
    stopped = client.chat_completion(QUESTION, max_tokens=20, stop=["es"], temperature=0.0).choices[0]
    assert stopped.message.content == "Y" and stopped.finish_reason == "stop"


def check_tools() -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": city}}]
    question = [{"role": "user", "content": "What is the weather in Rome?"}]
    named = {"function": {"name": "get_weather"}, "type": "function"}
    for choice in ("required", named, "auto"):
        answer = client.chat_completion(question, tools=tools, tool_choice=choice, max_tokens=80, temperature=0.0)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Rome"}, choice
        assert answer.choices[0].finish_reason == "tool_calls"
    chunks = client.chat_completion(
        question, tools=tools, tool_choice="required", max_tokens=80, temperature=0.0, stream=True
    )
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert calls[0].function.name == "get_weather"
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Rome"}


def check_logprobs_and_counts() -> None:
    options = {"include_usage": True}
    chunks = list(client.chat_completion(QUESTION, max_tokens=5, stream=True, stream_options=options))
    assert chunks[-1].usage.completion_tokens > 0
    answer = client.chat_completion(QUESTION, max_tokens=3, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def check_async_client() -> None:
    asyncio.run(_use_async_client(AsyncInferenceClient(model=url, token="none")))


async def _use_async_client(other: AsyncInferenceClient) -> None:
    assert await other.text_generation(PROMPT, max_new_tokens=8, return_full_text=False) == " Paris."
    stream = await other.text_generation(PROMPT, max_new_tokens=8, stream=True)
    assert "".join([piece async for piece in stream]).startswith(" Paris.")
    answers = await asyncio.gather(*(other.chat_completion(QUESTION, max_tokens=10) for _ in range(4)))
    assert all(answer.choices[0].message.content for answer in answers)


def check_structure() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}},
        "required": ["name"],
        "additionalProperties": False,
    }
    formats = (
        {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        {"type": "json_object", "value": schema},
    )
    for response_format in formats:
        answer = client.chat_completion(QUESTION, max_tokens=60, response_format=response_format)
        assert set(json.loads(answer.choices[0].message.content)) == {"name"}
    number = client.text_generation("A number: ", grammar={"type": "regex", "value": "[0-9]{3}"}, max_new_tokens=9)
    assert number.removeprefix("A number: ").isdigit()


def check_errors() -> None:
    for fields in ({"temperature": -1.0}, {"max_new_tokens": 1_000_000}, {"adapter_id": "nobody"}):
        for stream in (False, True):
            try:
                answer = client.text_generation("x", stream=stream, **fields)
                list(answer)
            except ValidationError as error:
                refusal = str(error)
            else:
                raise AssertionError(f"{fields} was not refused")
            assert refusal.startswith("Input validation error"), refusal
    for fields in ({"temperature": -1.0}, {"max_tokens": 1_000_000}, {"model": "nobody"}):
        for stream in (False, True):
            try:
                list(client.chat_completion(QUESTION, stream=stream, **fields))
            except HfHubHTTPError as error:
                status = error.response.status_code
            else:
                raise AssertionError(f"{fields} was not refused")
            assert status in (400, 404), status


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok")
