"""Tests of an operator's Python controllers: requests choose them by name, and a controller that fails ends only its
own request."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bridle.controllers.plugins import load_classes, make_controller
from bridle.engine.request import name_of
from bridle.errors import InvalidRequest
from bridle.http import HttpSettings
from bridle.structured_output import JsonSchema
from tests.http.harness import scripted_model, served, tokenizer
from tests.http.routes import ROUTES, of_eight, post, text_of

CODE = """
from bridle import Controller, Decision

class Only(Controller):
    def __init__(self, tokens):
        self.tokens = [int(token) for token in tokens]

    def next(self, view):
        return Decision.sample(mask=view.mask_of(self.tokens))

class Broken(Controller):
    def next(self, view):
        if view.generated:
            raise RuntimeError("out of order")
        return Decision.sample()

class Other:
    pass
"""
XYZ = tokenizer().encode("xyz", False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("classes") / "mine.py"
    made.write_text(textwrap.dedent(CODE), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[httpx.Client]:
    settings = HttpSettings(controller_classes=load_classes([f"{file}:Only", f"broken={file}:Broken"]))
    with served(scripted_model(), settings) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_names_a_class_and_gives_it_an_argument(server: httpx.Client, route: str) -> None:
    fields = of_eight(route, {"controller": "class:Only", "controller_arg": XYZ})
    text = text_of(post(server, route, fields))
    assert len(text) == 8 and set(text) <= set("xyz")


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "/v1/run"])
def test_one_that_fails_ends_its_own_request(server: httpx.Client, route: str) -> None:
    for fields, told in (
        ({"controller": "class:broken"}, "out of order"),
        ({"controller": "class:Only", "controller_arg": ["x"]}, "class:Only could not be created: ValueError"),
        ({"controller": "class:Only"}, "class:Only could not be created: TypeError"),
        ({"controller": "class:Other"}, "the controller classes of this server are: class:Only, class:broken"),
        (
            {"controller": "class:Only", "controller_arg": XYZ, "constraint": {"regex": "a"}},
            "cannot be reconciled",
        ),
    ):
        refusal = post(server, route, of_eight(route, fields))
        assert refusal.status_code >= 400 and told in refusal.text, (fields, refusal.text)
    assert post(server, route, {}).status_code == 200


def test_classes_go_with_others_and_with_constraints(server: httpx.Client) -> None:
    fields = {"controllers": [{"controller": "class:Only", "controller_arg": XYZ}], "regex": "[w-y]{8}"}
    text = text_of(post(server, "/v1/completions", of_eight("/v1/completions", fields)))
    assert len(text) == 8 and set(text) <= set("xy")


def test_the_end_of_a_text_ends_it(server: httpx.Client) -> None:
    (end,) = tokenizer().eos_token_ids
    body = {"controller": "class:Only", "controller_arg": [end], "max_tokens": 8}
    assert post(server, "/v1/completions", body).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("nonsense", "must be [NAME=]MODULE:CLASS"),
        ("=a:B", "must be [NAME=]MODULE:CLASS"),
        ("no.such.module:A", "'no.such.module' cannot be loaded: ModuleNotFoundError"),
        ("nowhere.py:A", "'nowhere.py' cannot be loaded: FileNotFoundError"),
        ("FILE:Other", "is not a subclass of bridle.Controller"),
        ("FILE:Missing", "is not a subclass of bridle.Controller"),
    ],
)
def test_what_is_no_class_is_refused_at_the_start(file: Path, spec: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        load_classes([spec.replace("FILE", str(file))])
    assert told in str(refusal.value)


def test_a_name_is_given_once(file: Path) -> None:
    with pytest.raises(InvalidRequest, match="names 'Only' twice"):
        load_classes([f"{file}:Only", f"Only={file}:Broken"])


def test_the_command_refuses_it_before_anything_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    from bridle.cli import main

    assert main(["serve", "demo", "--controller-class", "no.such.module:A"]) != 0
    assert "no.such.module" in capfd.readouterr().err


def test_a_trace_names_a_controller_as_the_request_did(file: Path) -> None:
    classes = load_classes([f"short={file}:Only"])
    assert name_of(make_controller(classes, "class:short", [1])) == "class:short"
    assert name_of(JsonSchema({"type": "object"})) == "json_schema"
