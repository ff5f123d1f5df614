"""Checks with the real guidance and its clients of servers; the argument is a server's address."""

import json
import os
import sys

os.environ["OPENAI_API_KEY"] = "none"

import guidance
from guidance import assistant, gen, models, select, system, user
from guidance.models.experimental import SglangModel, VLLMModel
from pydantic import BaseModel, Field

url = sys.argv[1]
TO = {"base_url": url + "/v1", "api_key": "none", "max_retries": 0}
vllm = VLLMModel("demo", echo=False, **{name: value for name, value in TO.items() if name != "max_retries"})
sglang = SglangModel("demo", echo=False, **{name: value for name, value in TO.items() if name != "max_retries"})
plain = models.OpenAI("demo", echo=False, **TO)


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def asked(model, question="Is snow white?"):
    with system():
        model += "Answer briefly."
    with user():
        model += question
    return model


def check_text() -> None:
    for model in (plain, sglang, vllm):
        said = asked(model)
        with assistant():
            said += gen("answer", max_tokens=20, temperature=0.01)
        assert said["answer"].startswith("Yes"), (model, said["answer"])


def check_regex() -> None:
    said = asked(vllm, "A number?")
    with assistant():
        said += gen("number", regex="[0-9]{3}", max_tokens=10)
    assert said["number"].isdigit() and len(said["number"]) == 3, said["number"]
    said = asked(sglang, "A number?")
    with assistant():
        said += gen("number", regex="[0-9]{3}", max_tokens=10)
    assert said["number"].isdigit() and len(said["number"]) == 3, said["number"]


def check_select_and_captures() -> None:
    said = asked(vllm)
    with assistant():
        said += "Answer: " + select(["yes", "no", "maybe"], name="choice") + "!" + gen("rest", regex="[a-z]+")
    assert said["choice"] in ("yes", "no", "maybe") and said["rest"].islower(), said


def check_json() -> None:
    for model in (vllm, sglang, plain):
        said = asked(model, "Tell me about a person.")
        with assistant():
            said += guidance.json(name="person", schema=Person)
        assert Person.model_validate(json.loads(said["person"])), said


def check_stateful_functions() -> None:
    @guidance(stateless=True)
    def pair(lm):
        return lm + gen(regex="[0-9]", name="first") + "," + gen(regex="[0-9]", name="second")

    said = asked(vllm, "Two numbers?")
    with assistant():
        said += pair()
    assert said["first"].isdigit() and said["second"].isdigit(), said


def check_a_turn_is_one_edit() -> None:
    """guidance's clients refuse a second edit of an assistant's turn themselves; one edit, or two turns, gets an
    answer."""
    for model in (vllm, sglang, plain):
        said = asked(model)
        try:
            with assistant():
                said += "Answer: "
                said += gen("answer", max_tokens=5)
        except ValueError as error:
            assert "pre-filled assistant messages" in str(error), error
        else:
            raise AssertionError("guidance sends a second edit now: docs/coming-from.md says that it does not")
    said = asked(vllm)
    for name in ("first", "second"):
        with assistant():
            said += gen(name, regex="[a-z]{3}", max_tokens=10)
        with user():
            said += "And another one?"
    assert len(said["first"]) == len(said["second"]) == 3, said


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok", flush=True)
