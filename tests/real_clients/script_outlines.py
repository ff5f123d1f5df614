"""Checks with the real outlines and its clients of servers; the argument is a server's address."""

import asyncio
import json
import sys
from enum import Enum
from typing import Literal

import openai
import outlines
from huggingface_hub import AsyncInferenceClient, InferenceClient
from outlines.inputs import Chat
from outlines.types import CFG, JsonSchema, Regex
from pydantic import BaseModel, Field

url = sys.argv[1]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
many = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
vllm, sglang = outlines.from_vllm(client, "demo"), outlines.from_sglang(client, "demo")
usual = outlines.from_openai(client, "demo")
tgi = outlines.from_tgi(InferenceClient(url, token="none"))
#: Text generation gives the prompt, too, as text-generation-inference does, unless it is told otherwise.
REST = {"return_full_text": False}
SERVERS = ((vllm, "max_tokens", {}), (sglang, "max_tokens", {}), (tgi, "max_new_tokens", REST))
ABOUT = "Tell me about a person."
LARK = 'start: "red" | "blue" " "? "sky"'


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


def check_text() -> None:
    for model, length, more in SERVERS:
        assert model("Is snow white?", **{length: 20}, **more), model
        assert "".join(model.stream("Is snow white?", **{length: 20}, **more))
    said = Chat([{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is snow white?"}])
    for model in (vllm, sglang, usual):
        assert model(said, max_tokens=20).startswith("Yes")


def check_types() -> None:
    for model, length, more in SERVERS:
        for kind, allowed in ((Literal["yes", "no"], ("yes", "no")), (Color, ("red", "blue"))):
            assert model("Which one?", kind, **{length: 20}, **more) in allowed, (model, kind)
        assert model("A number?", Regex("[0-9]{3}"), **{length: 20}, **more).isdigit(), model
        assert int(model("A number?", int, **{length: 40}, **more)) is not None, model
        for kind in (Person, JsonSchema(Person.model_json_schema())):
            assert Person.model_validate_json(model(ABOUT, kind, **{length: 80}, **more)), model
            assert Person.model_validate_json("".join(model.stream(ABOUT, kind, **{length: 80}, **more))), model
    assert Person.model_validate_json(usual(ABOUT, Person, max_tokens=80))


def check_grammars() -> None:
    for _ in range(3):
        assert vllm("A color?", CFG(LARK), max_tokens=20) in ("red", "bluesky", "blue sky")
    assert sglang("A color?", CFG('root ::= "red" | "blue"'), max_tokens=20) in ("red", "blue")


def check_generators() -> None:
    generator = outlines.Generator(vllm, Person)
    assert Person.model_validate_json(generator(ABOUT, max_tokens=80))
    listed = vllm("Numbers?", JsonSchema({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}), max_tokens=80)
    assert set(json.loads(listed)) <= {1, 2}
    several = vllm("A number?", Regex("[0-9]"), max_tokens=9, n=3)
    assert len(several) == 3 and all(text.isdigit() for text in several)


def check_async_client() -> None:
    async def ask() -> None:
        for model, length, more in (
            (outlines.from_vllm(many, "demo"), "max_tokens", {}),
            (outlines.from_sglang(many, "demo"), "max_tokens", {}),
            (outlines.from_tgi(AsyncInferenceClient(url, token="none")), "max_new_tokens", REST),
        ):
            assert Person.model_validate_json(await model(ABOUT, Person, **{length: 80}, **more))
            pieces = [piece async for piece in model.stream(ABOUT, Person, **{length: 80}, **more)]
            assert Person.model_validate_json("".join(pieces))

    asyncio.run(ask())


def check_errors() -> None:
    for model, kind in ((vllm, Regex("(?=a)b")), (vllm, CFG("start: nothing")), (sglang, CFG("root ::= nothing"))):
        try:
            answer = model("x", kind, max_tokens=5)
        except Exception as error:
            assert "400" in str(error) or getattr(error, "status_code", None) == 400, repr(error)
            continue
        raise AssertionError(f"{kind} was not refused: {answer}")


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok", flush=True)
