"""Checks with the real pydantic-ai; the argument is a server's address."""

import asyncio
import sys
from typing import Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url = sys.argv[1]
ABOUT = "Tell me about a person."
SETTINGS = ModelSettings(max_tokens=120, temperature=0.0)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def models():
    ours = OpenAIProvider(base_url=url + "/v1", api_key="none")
    claude = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=url, api_key="none", max_retries=0))
    return (
        OpenAIChatModel("demo", provider=ours),
        OpenAIResponsesModel("demo", provider=ours),
        AnthropicModel("demo", provider=claude),
    )


async def check_text() -> None:
    for model in models():
        agent = Agent(model, system_prompt="Answer in one word.", model_settings=SETTINGS)
        answer = await agent.run("What is the capital of France?")
        assert answer.output.startswith("Paris") and answer.usage.output_tokens > 0, (model, answer)
        again = await agent.run("What is the capital of Italy?", message_history=answer.all_messages())
        assert "Rome" in again.output, (model, again)


async def check_streams() -> None:
    for model in models():
        async with Agent(model, model_settings=SETTINGS).run_stream("Is snow white?") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces).startswith("Yes"), (model, pieces)


def weather(asked: list[str]):
    """Return a tool that appends the city of each call to `asked`."""

    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """Get the weather in a city."""
        asked.append(city)
        return "sunny"

    return get_weather


async def check_tools() -> None:
    for model in models():
        asked: list[str] = []
        agent = Agent(model, tools=[weather(asked)], model_settings=SETTINGS)
        answer = await agent.run("What is the weather in Rome?")
        assert asked == ["Rome"] and "sunny" in answer.output, (model, asked, answer)


async def check_structure() -> None:
    for model in models():
        # pydantic-ai itself offers no native form for models of Anthropic's that it does not know.
        native = [] if isinstance(model, AnthropicModel) else [NativeOutput(Person)]
        for kind in (Person, ToolOutput(Person), bool, Literal["red", "blue"], *native):
            answer = await Agent(model, output_type=kind, model_settings=SETTINGS, retries=0).run(ABOUT)
            assert isinstance(answer.output, (Person, bool, str)), (model, kind, answer)
        for kind in (Person, *native):
            async with Agent(model, output_type=kind, model_settings=SETTINGS).run_stream(ABOUT) as stream:
                assert isinstance(await stream.get_output(), Person), (model, kind)


async def check_thoughts() -> None:
    model = models()[0]
    asked = ModelSettings(max_tokens=120, temperature=0.0, extra_body={"thinking_budget": 60})
    answer = await Agent(model, model_settings=asked).run("What is 3 + 4?")
    thoughts = [part for part in answer.all_messages()[-1].parts if part.part_kind == "thinking"]
    assert thoughts and thoughts[0].content and "think>" not in answer.output, answer


async def check_errors() -> None:
    for model in models():
        try:
            await Agent(model, model_settings=ModelSettings(temperature=-1.0)).run("x")
        except ModelHTTPError as error:
            assert error.status_code == 400, error
        else:
            raise AssertionError("nothing was refused")


async def main() -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            await check()
            print(name, "ok", flush=True)


asyncio.run(main())
