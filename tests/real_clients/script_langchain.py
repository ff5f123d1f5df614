"""Checks with the real LangChain clients; the argument is a server's address."""

import asyncio
import sys
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

url = sys.argv[1]
TO = {
    "model": "demo",
    "base_url": url + "/v1",
    "api_key": "none",
    "temperature": 0,
    "max_retries": 0,
    "stream_usage": True,
}
chat = ChatOpenAI(**TO, max_tokens=80)
responses = ChatOpenAI(**TO, max_tokens=80, use_responses_api=True)
anthropic = ChatAnthropic(
    model="demo", base_url=url, api_key="none", temperature=0, max_retries=0, max_tokens=80, stop=None
)
KINDS = (chat, responses, anthropic)
QUESTION = "What is the weather in Rome?"


@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Get the weather in a city."""
    return f"It is sunny in {city}."


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def check_text() -> None:
    for kind in KINDS:
        answer = kind.invoke([SystemMessage("Answer in one word."), HumanMessage("What is the capital of France?")])
        assert answer.text.startswith("Paris"), answer
        assert answer.usage_metadata["output_tokens"] > 0, answer
    completion = OpenAI(model="demo", base_url=url + "/v1", api_key="none", temperature=0, max_tokens=8)
    assert completion.invoke("The capital of France is") == " Paris."
    assert "".join(completion.stream("The capital of France is")) == " Paris."
    both = completion.generate(["The capital of France is", "The capital of Italy is"])
    assert [row[0].text for row in both.generations] == [" Paris.", " Rome."], both


def check_stream() -> None:
    for kind in KINDS:
        chunks = list(kind.stream("Is snow white?"))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert whole.text.startswith("Yes") and len(chunks) > 2, chunks
        assert whole.usage_metadata["output_tokens"] > 0, whole


def check_batch_and_async() -> None:
    for kind in KINDS:
        answers = kind.batch(["Is snow white?"] * 3)
        assert all(answer.text.startswith("Yes") for answer in answers)
    for text in asyncio.run(_texts()):
        assert text.startswith("Yes"), text


async def _texts() -> list[str]:
    return ["".join([chunk.text async for chunk in kind.astream("Is snow white?")]) for kind in KINDS]


def check_stop_logprobs_and_seed() -> None:
    assert chat.invoke("Is snow white?", stop=["es"]).content == "Y"
    assert anthropic.invoke("Is snow white?", stop=["es"]).content == "Y"
    said = chat.bind(logprobs=True, top_logprobs=2).invoke("Is snow white?").response_metadata["logprobs"]["content"]
    assert len(said[0]["top_logprobs"]) == 2
    drawn = ChatOpenAI(**(TO | {"temperature": 1.0}), max_tokens=20, seed=3, n=2)
    first, again = (drawn.generate([[HumanMessage("Tell me a story.")]]) for _ in range(2))
    assert [row.text for row in first.generations[0]] == [row.text for row in again.generations[0]]
    steered = ChatOpenAI(**TO, max_tokens=80, extra_body={"regex": "[0-9]{3}"})
    assert steered.invoke("A number?").content.isdigit()


def check_tools() -> None:
    for kind in KINDS:
        for choice in ("any", "get_weather", "auto"):
            answer = kind.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION)
            (call,) = answer.tool_calls
            assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"}), answer
        whole = None
        for chunk in kind.bind_tools([get_weather], tool_choice="any").stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert [each["args"] for each in whole.tool_calls] == [{"city": "Rome"}], whole
        turns = [HumanMessage(QUESTION), answer, ToolMessage("sunny", tool_call_id=call["id"])]
        assert "sunny" in kind.bind_tools([get_weather]).invoke(turns).text


def check_agent() -> None:
    for kind in KINDS:
        agent = create_agent(kind, [get_weather])
        turns = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
        assert isinstance(turns[-1], AIMessage) and "sunny" in turns[-1].text, turns
        assert isinstance(turns[-2], ToolMessage)


def check_structure() -> None:
    for kind in KINDS:
        for method in ("json_schema", "function_calling"):
            for strict in (None, True):
                options = {} if kind is anthropic or strict is None else {"strict": strict}
                made = kind.with_structured_output(Person, method=method, **options).invoke("Tell me about a person.")
                assert isinstance(made, Person), (kind, method, made)
        both = kind.with_structured_output(Person, include_raw=True).invoke("Tell me about a person.")
        assert both["parsing_error"] is None and both["parsed"], both
    mode = chat.with_structured_output(None, method="json_mode").invoke("Write a JSON record about a cat.")
    assert set(mode) <= {"name", "age"}, mode
    *_, last = chat.with_structured_output(Person.model_json_schema()).stream("Tell me about a person.")
    assert Person.model_validate(last)


def check_structured_agents() -> None:
    for kind in KINDS:
        for strategy in (ProviderStrategy(Person), ToolStrategy(Person)):
            agent = create_agent(kind, [], response_format=strategy)
            made = agent.invoke({"messages": [("user", "Tell me about a person.")]})
            assert isinstance(made["structured_response"], Person), made


def check_errors() -> None:
    for kind in KINDS:
        too_long = [{"max_tokens": 1_000_000}] if kind is chat else []  # the others do not send it, or may ask for more
        for fields in ({"temperature": -1.0}, {"model": "nobody"}, *too_long):
            for ask in (kind.invoke, lambda *given, kind=kind, **more: list(kind.stream(*given, **more))):
                try:
                    ask("x", **fields)
                except Exception as error:
                    status = getattr(error, "status_code", None)
                    assert status in (400, 404), (fields, repr(error))
                else:
                    raise AssertionError(f"{fields} was not refused")


def check_embeddings_are_refused_in_words() -> None:
    vectors = OpenAIEmbeddings(
        model="demo", base_url=url + "/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    try:
        found = vectors.embed_documents(["a", "b"])
    except Exception as error:
        assert getattr(error, "status_code", None) in (400, 404), repr(error)
    else:
        assert len(found) == 2 and len(found[0]) > 8


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok", flush=True)
