"""Tests of the shipped demo model for images: it is small, and answers questions about images of shapes correctly."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from bridle import LLM, Choice, Controller, Decision, SequenceView
from bridle.cli import main
from bridle.demo import DEMO_MODELS, demo_model_path
from bridle.http import create_app
from bridle.model.hub_lookup import resolve_model
from bridle.serving import ModelRegistry
from tests.sources import ROOT

MAX_BYTES = 4_000_000
PLACES = ("top left", "top right", "bottom left", "bottom right")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48}
EXAMPLE = ROOT / "examples" / "pictures" / "shapes.png"
DESCRIBED = "A red circle in the top left, a blue star in the bottom left, a yellow square in the bottom right."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-sees", num_blocks=256) as loaded:
        yield loaded


def asked(text: str, *pictures: object) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def answer(llm: LLM, text: str, *pictures: object, **options: Any) -> str:
    return llm.chat(asked(text, *pictures), **GREEDY, **options)[0].text


def test_the_folder_is_complete_and_small() -> None:
    folder = demo_model_path("demo-sees")
    assert resolve_model("demo-sees") == folder
    assert DEMO_MODELS == ("demo", "demo-sees")
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "preprocessor_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in folder.iterdir()) < MAX_BYTES


def test_the_example_of_the_page_runs(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(llm, "What do you see?", EXAMPLE) == DESCRIBED
    words = ["--chat", "--image", str(EXAMPLE), "--temperature", "0", "--no-stats"]
    assert main(["generate", "demo-sees", "Where is the blue shape?", *words]) == 0
    assert "In the bottom left." in capsys.readouterr().out


def test_the_demo_model_remembers_an_image(llm: LLM) -> None:
    session = llm.session(**GREEDY)
    first = [{"type": "image", "image": EXAMPLE}, {"type": "text", "text": "How many shapes are there?"}]
    assert session.send([{"role": "user", "content": first}]) == "Three."
    assert session.send("What color is the shape in the bottom right?") == "Yellow."


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("What color is the circle?", "Red."),
        ("What color is the triangle?", "There is no triangle."),
        ("Where is the star?", "In the bottom left."),
        ("Where is the yellow square?", "In the bottom right."),
        ("How many circles are there?", "One."),
        ("Is there a blue star?", "Yes."),
        ("Is there a triangle?", "No."),
    ],
)
def test_it_finds_things_by_their_shape(llm: LLM, question: str, said: str) -> None:
    assert answer(llm, question, EXAMPLE) == said


def test_without_a_picture_it_says_so(llm: LLM) -> None:
    assert answer(llm, "What do you see?") == "I see no picture."
    assert answer(llm, "Hello!") == "Hello! Ask me about a picture of shapes."


def test_a_choice_bounds_the_answer(llm: LLM) -> None:
    places = Choice([f"In the {place}" for place in PLACES])
    assert answer(llm, "Where is the blue shape?", EXAMPLE, constraint=places) == "In the bottom left"


class Not(Controller):
    """A controller that allows every first token except one."""

    def __init__(self, token: int) -> None:
        self._token = token

    def next(self, view: SequenceView) -> Decision:
        others = (token for token in range(view.vocab_size) if token != self._token)
        return Decision.sample() if view.generated else Decision.sample(view.mask_of(others))


def test_a_controller_steers_the_answer(llm: LLM) -> None:
    assert answer(llm, "Is there a yellow shape?", EXAMPLE) == "Yes."
    (yes,) = llm.tokenizer.encode("Yes", add_special_tokens=False)
    assert answer(llm, "Is there a yellow shape?", EXAMPLE, controller=Not(yes)) != "Yes."


def test_the_demo_model_sees_over_http(llm: LLM) -> None:
    url = f"data:image/png;base64,{base64.b64encode(EXAMPLE.read_bytes()).decode()}"
    content = [{"type": "text", "text": "What do you see?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "demo-sees", "messages": [{"role": "user", "content": content}], **GREEDY}
    with TestClient(create_app(ModelRegistry([llm.model])), base_url="http://127.0.0.1") as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == "demo-sees"
        reply = client.post("/v1/chat/completions", json=body).json()
        assert reply["choices"][0]["message"]["content"] == DESCRIBED
        assert reply["choices"][0]["finish_reason"] == "stop"
        said = client.post("/v1/chat/completions", json=body | {"stream": True}).text
    pieces = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == DESCRIBED


@pytest.mark.parametrize("side", [64, 300, 1000])
def test_pictures_of_any_size(llm: LLM, side: int) -> None:
    file = io.BytesIO()
    with Image.open(EXAMPLE) as example:
        example.convert("RGB").resize((side, side)).save(file, "PNG")
    assert answer(llm, "What do you see?", file.getvalue()) == DESCRIBED
