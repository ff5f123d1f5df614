"""Checks with the real instructor in each mode that an OpenAI or Anthropic client has; the argument is a server's
address."""

import asyncio
import sys
import warnings
from collections.abc import Iterable
from typing import Literal

import anthropic
import instructor
import openai
from instructor import Mode
from instructor.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, Field

warnings.simplefilter("ignore")
url = sys.argv[1]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
ABOUT = [{"role": "user", "content": "Tell me about a person."}]
WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
#: Modes in which the server holds the form. In the others the model is only asked for it.
HELD = (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


class get_weather(BaseModel):  # noqa: N801 -- the name of the tool
    """Get the weather in a city."""

    city: Literal["Rome", "Oslo"]


def made(asked, mode, **fields):
    usual = {"model": "demo", "messages": ABOUT, "max_tokens": 120, "temperature": 0, "max_retries": 0}
    return instructor.from_openai(asked, mode=mode).create(**(usual | {"response_model": Person} | fields))


def check_modes_that_hold_the_form() -> None:
    for mode in HELD:
        person = made(client, mode)
        assert isinstance(person, Person), (mode, person)
    asyncio.run(_later())


async def _later() -> None:
    many = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    for mode in HELD:
        assert isinstance(await made(many, mode), Person), mode


def check_modes_that_ask_for_it() -> None:
    """The server accepts requests in instructor's prompting modes; the small model need not answer them with a valid
    object."""
    for mode in (Mode.JSON, Mode.MD_JSON, Mode.PARALLEL_TOOLS):
        kind = Iterable[get_weather] if mode is Mode.PARALLEL_TOOLS else Person
        messages = WEATHER if mode is Mode.PARALLEL_TOOLS else ABOUT
        try:
            person = made(client, mode, response_model=kind, messages=messages)
        except (IncompleteOutputException, InstructorRetryException) as error:
            assert mode is not Mode.PARALLEL_TOOLS and "400" not in str(error)[:200], (mode, str(error))
        else:
            found = list(person) if mode is Mode.PARALLEL_TOOLS else [person]
            assert found and all(isinstance(each, (Person, get_weather)) for each in found), (mode, found)


def check_streams() -> None:
    for mode in HELD:
        patched = instructor.from_openai(client, mode=mode)
        usual = {"model": "demo", "messages": ABOUT, "max_tokens": 120, "temperature": 0, "max_retries": 0}
        parts = list(patched.create_partial(response_model=Person, **usual))
        assert Person.model_validate(parts[-1].model_dump()), (mode, parts)
        assert len(parts) > 1 or mode is Mode.RESPONSES_TOOLS, (mode, parts)  # instructor waits for the end there


def check_details() -> None:
    person, answer = instructor.from_openai(client).chat.completions.create_with_completion(
        model="demo", messages=ABOUT, max_tokens=120, response_model=Person, max_retries=0
    )
    assert isinstance(person, Person) and answer.usage.completion_tokens > 0


def check_claude() -> None:
    for mode in (
        Mode.ANTHROPIC_TOOLS,
        Mode.ANTHROPIC_REASONING_TOOLS,
        Mode.ANTHROPIC_JSON,
        Mode.ANTHROPIC_PARALLEL_TOOLS,
    ):
        patched = instructor.from_anthropic(claude, mode=mode)
        is_many = mode is Mode.ANTHROPIC_PARALLEL_TOOLS
        usual = {"model": "demo", "messages": WEATHER if is_many else ABOUT, "max_tokens": 120, "max_retries": 0}
        try:
            found = patched.create(response_model=Iterable[get_weather] if is_many else Person, **usual)
        except (IncompleteOutputException, InstructorRetryException) as error:
            assert mode is not Mode.ANTHROPIC_TOOLS and "400" not in str(error)[:200], (mode, str(error))
        else:
            assert all(isinstance(each, (Person, get_weather)) for each in (list(found) if is_many else [found]))


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok", flush=True)
