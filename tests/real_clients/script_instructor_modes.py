"""Checks with the real instructor and a scripted model that answers as a good model would; the argument is a server's
address. Each of instructor's modes for OpenAI and Anthropic clients must give the object."""

import asyncio
import sys
import warnings
from collections.abc import Iterable

import anthropic
import instructor
import openai
from instructor import Mode, Provider
from instructor.v2.core.registry import mode_registry, normalize_mode
from pydantic import BaseModel

warnings.simplefilter("ignore")
url = sys.argv[1]
USUAL = {
    "model": "scripted", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 200, "temperature": 0,
    "max_retries": 0,
}  # fmt: skip


#: With this the model calls by itself.
CALL = {"messages": [{"role": "user", "content": "Call it."}]}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


EXPECTED = {"name": "Ada", "age": 36}


def modes(provider):
    """Return the modes that instructor has for a provider, under all their names."""
    return [mode for mode in Mode if mode_registry.is_registered(provider, normalize_mode(provider, mode))]


def is_many(mode):
    return normalize_mode(Provider.OPENAI, mode) is Mode.PARALLEL_TOOLS or "PARALLEL" in mode.name


def check_openai() -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    found = modes(Provider.OPENAI)
    assert {Mode.JSON, Mode.MD_JSON, Mode.JSON_SCHEMA, Mode.TOOLS, Mode.RESPONSES_TOOLS} <= set(found), found
    for mode in found:
        patched = instructor.from_openai(client, mode=mode)
        if is_many(mode):
            got = list(patched.create(response_model=Iterable[Person], **USUAL | CALL))
            assert [each.model_dump() for each in got] == [EXPECTED], (mode, got)
        else:
            got = patched.create(response_model=Person, **USUAL)
            assert got.model_dump() == EXPECTED, (mode, got)
        print(mode.name, flush=True)


def check_later() -> None:
    asyncio.run(_later())


async def _later() -> None:
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    for mode in (Mode.JSON, Mode.MD_JSON, Mode.JSON_SCHEMA, Mode.TOOLS):
        got = await instructor.from_openai(client, mode=mode).create(response_model=Person, **USUAL)
        assert got.model_dump() == EXPECTED, (mode, got)


def check_streams() -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    for mode in (Mode.JSON, Mode.MD_JSON, Mode.JSON_SCHEMA):
        parts = list(instructor.from_openai(client, mode=mode).create_partial(response_model=Person, **USUAL))
        assert parts and parts[-1].model_dump() == EXPECTED, (mode, parts)


def check_anthropic() -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    found = modes(Provider.ANTHROPIC)
    assert {Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON} <= set(found), found
    for mode in found:
        usual = {name: value for name, value in USUAL.items() if name != "temperature"}
        patched = instructor.from_anthropic(client, mode=mode)
        if is_many(mode):
            got = list(patched.create(response_model=Iterable[Person], **usual | CALL))
            assert [each.model_dump() for each in got] == [EXPECTED], (mode, got)
            continue
        got = patched.create(response_model=Person, **usual)
        assert got.model_dump() == EXPECTED, (mode, got)
        print(mode.name, flush=True)


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok", flush=True)
