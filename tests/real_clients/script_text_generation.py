"""Checks with the real `text-generation` client; the argument is a server's address."""

import asyncio
import json
import sys

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import Grammar, GrammarType, Message, Tool

client = Client(sys.argv[1], timeout=60)
PROMPT = "The capital of France is"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def check_generate() -> None:
    answer = client.generate(PROMPT, max_new_tokens=8, top_n_tokens=2, decoder_input_details=True)
    details = answer.details
    assert answer.generated_text == " Paris.", answer
    assert details.finish_reason == "eos_token" and details.generated_tokens == len(details.tokens)
    assert details.prefill[0].logprob is None and len(details.top_tokens[0]) == 2 and details.seed is None


def check_stream() -> None:
    events = list(client.generate_stream(PROMPT, max_new_tokens=8))
    assert "".join(event.token.text for event in events if not event.token.special) == " Paris."
    assert events[-1].generated_text == " Paris." and events[-1].details.finish_reason == "eos_token"


def check_sampling() -> None:
    fields = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "typical_p": 0.9}
    first = client.generate("Once upon a time", seed=7, **fields)
    again = client.generate("Once upon a time", seed=7, **fields)
    assert first.generated_text == again.generated_text and first.details.seed == 7
    marked = client.generate("Once upon a time", watermark=True, repetition_penalty=1.2, seed=7, **fields)
    assert marked.generated_text
    best = client.generate("Once upon a time", best_of=2, **fields)
    assert len(best.details.best_of_sequences) == 1


def check_stop() -> None:
    answer = client.generate("Once upon a time", max_new_tokens=60, stop_sequences=["."])
    assert answer.details.finish_reason == "stop_sequence" and answer.generated_text.endswith(".")
    assert answer.generated_text.count(".") == 1
    cut = client.generate("Once upon a time", max_new_tokens=5, truncate=2, return_full_text=True)
    assert cut.details.finish_reason == "length" and cut.generated_text.startswith("Once upon a time")


def check_grammar() -> None:
    grammar = Grammar(type=GrammarType.Regex, value="[0-9]{3}")
    assert client.generate("A number:", max_new_tokens=10, grammar=grammar).generated_text.strip().isdigit()
    schema = Grammar(type=GrammarType.Json, value=CITY)
    answer = client.generate("A city as JSON: ", max_new_tokens=40, grammar=schema)
    assert json.loads(answer.generated_text)["city"] in ("Rome", "Oslo")
    pieces = client.generate_stream("A city as JSON: ", max_new_tokens=40, grammar=schema)
    assert json.loads("".join(piece.token.text for piece in pieces if not piece.token.special))["city"]


def check_chat() -> None:
    answer = client.chat([Message(role="user", content="Is snow white?")], max_tokens=10)
    assert answer.choices[0].message.content.startswith("Yes"), answer
    story = [Message(role="user", content="Tell me a short story.")]
    first, again = (client.chat(story, max_tokens=20, seed=5, temperature=1.0, n=2) for _ in range(2))
    assert [choice.message for choice in first.choices] == [choice.message for choice in again.choices]
    rows = client.chat(story, max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs["content"]
    assert [len(row["top_logprobs"]) for row in rows] == [2, 2, 2]


def check_tools() -> None:
    tools = [Tool(type="function", function={"name": "get_weather", "parameters": CITY})]
    question = [Message(role="user", content="What is the weather in Rome?")]
    for choice in ("get_weather", "required"):
        answer = client.chat(question, tools=tools, tool_choice=choice, max_tokens=80, temperature=0.01)
        call = answer.choices[0].message.tool_calls[0]["function"]
        assert call["name"] == "get_weather" and json.loads(call["arguments"]) == {"city": "Rome"}, answer


def check_async_client() -> None:
    asyncio.run(_use_async_client(AsyncClient(sys.argv[1], timeout=60)))


async def _use_async_client(other: AsyncClient) -> None:
    answers = await asyncio.gather(*(other.generate(PROMPT, max_new_tokens=8) for _ in range(4)))
    assert {answer.generated_text for answer in answers} == {" Paris."}
    pieces = [piece async for piece in other.generate_stream(PROMPT, max_new_tokens=8)]
    assert pieces[-1].generated_text == " Paris."
    answer = await other.chat([Message(role="user", content="Is snow white?")], max_tokens=10)
    assert answer.choices[0].message.content.startswith("Yes")
    refusal = None
    try:
        await other.generate("x", max_new_tokens=1_000_000)
    except ValidationError as error:
        refusal = error
    assert "1000000" in str(refusal)


def check_errors() -> None:
    question = [Message(role="user", content="x")]
    for call in (
        lambda: client.generate("x", max_new_tokens=1_000_000),
        lambda: list(client.generate_stream("x", max_new_tokens=1_000_000)),
        lambda: client.chat(question, max_tokens=1_000_000),
    ):
        try:
            call()
        except ValidationError as error:
            refusal = str(error)
        else:
            raise AssertionError("nothing was refused")
        assert "1000000" in refusal, refusal


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok")
