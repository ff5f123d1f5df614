"""Tests of names of standard controllers: accepted forms, tags that take precedence, and names that mean something
else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridle import LLM, WasmController
from bridle.controllers.standard import names
from bridle.controllers.standard.references import standard_name
from bridle.serving import LoadedModel
from tests.aici.guests import END, guest2
from tests.http.controlled import Client, controlled_model, last_fork, lent, pick, text_of
from tests.http.harness import served

FORMS = ("{}", "{}/latest", "aici_{}", "aici_{}.wasm")


def test_every_form_of_a_name() -> None:
    for name in names():
        for form in ("{}", "{}-latest", *(f"gh:microsoft/aici/{form}" for form in FORMS)):
            assert standard_name(form.format(name)) == name, form


def test_a_short_tag_means_a_standard_controller() -> None:
    for reference, name in (("js-latest", "jsctrl"), ("py-latest", "pyctrl"), ("decl-latest", "declctrl")):
        assert name in names() and standard_name(reference) == name


def test_what_means_something_else() -> None:
    """Names with a release number, or in other people's repositories, do not mean a standard controller."""
    plain = ("none", "", "yes", "yesno2", "latest", "-latest", "js", "ctrl-latest", "../yesno")
    ours = ("aici", "aici/", "aici/yesno/v0.2.1", "aici/latest/yesno", "guidance/yesno")
    others = ("gh:somebody/aici/yesno", "GH:microsoft/aici/yesno")
    for reference in (*plain, *(f"gh:microsoft/{name}" for name in ours), *others):
        assert standard_name(reference) is None, reference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    with controlled_model(tmp_path_factory.mktemp("store")) as model:
        yield model


@pytest.fixture
def client(model: LoadedModel) -> Iterator[Client]:
    with served(lent(model)) as url:
        client = Client(url)
        yield client
        client.close()


@pytest.mark.parametrize("name", ["yesno", "yesno-latest", "gh:microsoft/aici/yesno", "gh:microsoft/aici/yesno/latest"])
def test_names_run_on_the_aici_route(client: Client, name: str) -> None:
    items = client.run(name, prompt="Is it so?")
    assert text_of(items) in ("Yes", "No")
    assert last_fork(items)["finish_reason"] == "aici-stop"


def test_names_run_on_the_openai_routes(client: Client) -> None:
    answer = client.post("/v1/completions", prompt="Is it so?", controller="yesno", temperature=0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] in ("Yes", "No")


def test_names_run_in_programs(model: LoadedModel) -> None:
    llm = LLM(lent(model))
    for name in ("yesno", "gh:microsoft/aici/yesno"):
        (output,) = llm.generate("Is it so?", controller=WasmController(name), use_tqdm=False)
        assert output.text in ("Yes", "No") and output.outputs[0].error is None


def test_a_tag_comes_before(client: Client) -> None:
    module = client.upload(guest2([pick("!"), END]))
    assert client.tag(module, "uppercase").status_code == 200
    assert text_of(client.run("uppercase", prompt="x")) == "!"
    assert text_of(client.run("gh:microsoft/aici/uppercase", prompt="xx", max_tokens=5)) != "!"


@pytest.mark.parametrize("name", ["gh:microsoft/aici/yesno/v0.2.1", "gh:somebody/else"])
def test_nothing_is_downloaded(client: Client, name: str) -> None:
    answer = client.post("/v1/run", controller=name, controller_arg="", prompt="x")
    assert answer.status_code == 400 and "downloads are not allowed" in answer.text
    assert client.post("/v1/run", controller="yesno2", controller_arg="").status_code == 400
