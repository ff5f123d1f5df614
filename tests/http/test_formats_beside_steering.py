"""Tests that calls are found in every kind of format, also in requests with a constraint, a controller that forces
tokens, drafts or a policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle.controllers import Controller, SequenceView
from bridle.controllers.plugins import load_classes
from bridle.engine.control.decision import Decision
from bridle.http import HttpSettings
from bridle.serving.policies import PolicyRegistry
from bridle.tokenizer import Tokenizer
from tests.fakes.call_templates import TEMPLATES, CallTemplate
from tests.http.harness import local_client, scripted_model
from tests.http.parked_chats import MISTRAL
from tests.http.tool_calls import a_tokenizer
from tests.http.turn_apis import APIS, Turn

ARGUMENTS: dict[str, Any] = {"city": "Rome", "mail": "to ann@example.org", "day": 12}
KINDS = {"city": "string", "mail": "string", "day": "integer"}
PARAMETERS = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in KINDS.items()},
    "required": [*KINDS],
    "additionalProperties": False,
}
TOOLS = [{"name": "find", "parameters": PARAMETERS}]
FORMATS = ["objects between tags", "functions with parameters", "a name, an id and JSON", "Python calls",
           "quoted strings", "a special token"]  # fmt: skip
ASKED = [{"role": "user", "content": "?"}]
CALLED = Turn("", "So: ", (("find", ARGUMENTS),), "calls")


class Forces(Controller):
    """A controller that writes a whole answer in one step."""

    def __init__(self, text: str) -> None:
        self.text = text

    def next(self, view: SequenceView) -> Decision:
        return Decision.stop() if view.generated else Decision.splice(0, view.encode(self.text))


class Hears(Controller):
    """A controller that changes nothing."""

    max_rewind = 0


@cache
def source(name: str) -> str:
    return MISTRAL.replace("ID", "") if name == "a special token" else TEMPLATES[name]


@cache
def text_of(name: str) -> str:
    """Return an answer with a tool call, in the template's format."""
    if name == "a special token":
        return f'So: [TOOL_CALLS][{{"name": "find", "arguments": {json.dumps(ARGUMENTS)}}}]'
    return CallTemplate(source(name)).calls([("find", ARGUMENTS)], "So: ")


def steering(said: str) -> dict[str, dict[str, Any]]:
    """Request fields that steer the output and allow the tool call."""
    return {
        "nothing": {},
        "drafts": {"speculate": 8, "prediction": {"type": "content", "content": said}},
        "a controller": {"controller": "class:Hears"},
        "forced tokens": {"controller": "class:Forces", "controller_arg": said},
        "a constraint": {"regex": "(?s:.*)"},
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_strict", [False, True], ids=["loose", "strict"])
def test_calls_are_found_beside_other_steering(name: str, is_strict: bool) -> None:
    with client_of(name) as client:
        for way, fields in steering(text_of(name)).items():
            if (name, way) == ("a special token", "a constraint"):  # refused, and documented
                continue
            assert asked(client, True, is_strict, **fields) == CALLED, way


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FORMATS)
def test_a_policy_changes_arguments_and_leaves_the_call(name: str, tmp_path: Path) -> None:
    file = tmp_path / "policies.toml"
    file.write_text('[[policy]]\nname = "mail"\nkind = "redact"\nwhat = ["email"]\n', encoding="utf-8")
    redacted = replace(CALLED, calls=(("find", ARGUMENTS | {"mail": "to [e-mail]"}),))
    with client_of(name, policies=PolicyRegistry(file)) as client:
        assert asked(client, True) == redacted


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off_is_no_text(name: str) -> None:
    """The answer reports the written part of an incomplete call as a call."""
    length = len(a_tokenizer(source(name)).encode(text_of(name).partition("@ex")[0], add_special_tokens=False))
    with client_of(name) as client:
        for is_stream in (False, True):
            turn = asked(client, is_stream, max_tokens=length)
            assert (turn.content, turn.end) == ("So: ", "length")
            assert [called for called, _ in turn.calls] == ["find"]


def heeding(said: str, text: Tokenizer) -> Callable[[Any], int]:
    """Return a script that continues the output after a policy's replacement of an address."""

    def next_token(prefix: Any) -> int:
        written = text.decode(list(prefix), skip_special_tokens=False).rpartition("<|im_start|>assistant\n")[2]
        rest = said[len(written.replace("[e-mail]", "ann@example.org")) :]
        return text.encode(rest, add_special_tokens=False)[0] if rest else text.eos_token_ids[0]

    return next_token


def client_of(name: str, **settings: Any) -> AbstractContextManager[TestClient]:
    """Return a client of a server whose model writes the tool call."""
    text = a_tokenizer(source(name))
    model = scripted_model(text=text, next_token=heeding(text_of(name), text), max_model_len=1024)
    classes = {**load_classes([]), "Forces": Forces, "Hears": Hears}
    return local_client(model, HttpSettings(controller_classes=classes, **settings))


def asked(client: TestClient, is_stream: bool, is_strict: bool = False, **fields: Any) -> Turn:
    tools = [each | {"strict": is_strict} for each in TOOLS]
    return APIS["chat"].ask(client, ASKED, tools, is_stream, **{"max_tokens": 300} | fields)
