"""Tests that the examples run unchanged in their folder."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridle import LLM, SamplingParams
from bridle.controllers import SequenceView
from bridle.engine import mask_allows
from bridle.tokenizer import Tokenizer
from examples import aici_transformers
from tests.fakes.tiny_checkpoints import make_checkpoint
from tests.sources import ROOT
from tests.tokenizer import kit

FOLDER = ROOT / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_examples_say_what_they_are_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    command = "bridle run" if "import pyaici" in text else "python"
    assert f"{command} examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")


def test_distinct_digits_fit_schema_and_controller(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("distinct_digits").main(folder)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        found = json.loads(line)
        digits = found["pin"] + found["code"]
        assert (len(found["pin"]), len(found["code"]), len(set(digits))) == (4, 3, 7)


def test_steer_writes_valid_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("steer").main(folder)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for line in lines:
        record = ast.literal_eval(line[: line.index("}") + 1])
        assert set(record) == {"name", "age", "city"}
        assert record["name"].replace(" ", "").isalpha()
        assert isinstance(record["age"], int)


@functools.cache
def form_over(kind: str) -> tuple[Any, Tokenizer]:
    tokenizer = Tokenizer.load("demo") if kind == "demo" else kit.make(kind)
    return load("steer").Form(tokenizer), tokenizer


@functools.cache
def allowed_by(mask: bytes, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that a mask allows: those that continue a field, and those that end it."""
    allowed = [token for token in range(tokenizer.vocab_size) if mask_allows(mask, token)]
    closing = [token for token in allowed if tokenizer.token_text(token)[0] in '",']
    return [token for token in allowed if token not in closing], closing


@pytest.mark.parametrize("kind", ["demo", "byte_level", "byte_fallback"])
@given(draws=st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 20)), min_size=40, max_size=40))
@example(draws=[*[(False, 0)] * 5, (True, 0), *[(False, 0)] * 5, (True, 0), *[(False, 0)] * 5, (True, 0)] * 3)
def test_steer_writes_valid_json_whatever_is_drawn(kind: str, draws: list[tuple[bool, int]]) -> None:
    """Any allowed token may be sampled at each place. Half of the tokens that may end a field do end it."""
    made, tokenizer = form_over(kind)
    form, left = copy.copy(made), iter(draws)
    view = SequenceView([0], 1, tokenizer.vocab_size)
    while (decision := form.next(view)).branches:
        (branch,) = decision.branches
        if branch.sample:
            ends, number = next(left)
            inside, closing = allowed_by(branch.mask, tokenizer)
            among = closing if ends and closing else inside
            view.tokens.append(among[number % len(among)])
        else:
            (splice,) = branch.splices
            assert splice.backtrack <= form.max_rewind
            view.tokens[len(view.tokens) - splice.backtrack :] = splice.ff_tokens
    record = json.loads(tokenizer.decode(view.generated))
    assert list(record) == ["name", "age", "city"]
    assert record["name"].strip().replace(" ", "").isalpha()
    assert isinstance(record["age"], int)


def test_custom_stopping_stops_where_it_says(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("custom_stopping")
    with LLM(folder) as llm:
        criterion = example.Sentences(llm.tokenizer, 2)
        tokens = llm.tokenizer.encode("One. Two! Three?", add_special_tokens=False)
        stops = [end for end in range(1, len(tokens) + 1) if criterion(tokens[:end], 0)]
        assert llm.tokenizer.decode(tokens[: stops[0]]) == "One. Two!"
        assert criterion(tokens[: stops[0]], stops[0]) is None
        dot = llm.tokenizer.encode(".", add_special_tokens=False)[0]
        sampling = SamplingParams(max_tokens=9, logit_bias={dot: 100.0})
        (output,) = llm.generate("x", sampling, stopping_criteria=criterion)
        assert (output.text, output.outputs[0].stop_reason) == ("..", "2 sentences")
    example.main(folder)
    assert capsys.readouterr().out.count("stopped:") == 2


def test_a_shipped_controller_steers_an_engine_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    aici_transformers.main()
    said = [line for line in capsys.readouterr().out.splitlines() if "⏳" not in line]  # late on a busy machine
    assert "\n".join(said).split() in (["[0]", "Yes"], ["[0]", "No"])


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Any]:
    app, engine = load("tiny_server").make_app(folder)
    with engine:
        yield app


def ask(app: Any, body: Any) -> httpx.Response:
    import asyncio

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/generate", content=body)

    return asyncio.run(post())


def test_the_tiny_server_streams(server: Any, folder: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    response = ask(server, json.dumps({"prompt": "hello", **fields}))
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]
    with LLM(folder) as llm:
        assert "".join(event["text"] for event in events) == llm.generate("hello", SamplingParams(**fields))[0].text


@pytest.mark.parametrize("body", ["{oops", "[]", "{}", '{"prompt": "x", "temperature": -1}', '{"prompt": "x", "y": 1}'])
def test_the_tiny_server_refuses_politely(server: Any, body: str) -> None:
    response = ask(server, body)
    assert response.status_code == 400
    assert response.json()["error"]


def test_the_tiny_server_is_tiny() -> None:
    assert len((FOLDER / "tiny_server.py").read_text(encoding="utf-8").splitlines()) < 60


def test_a_human_waits_while_the_server_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example waits and asks again while the server compiles. Any other refusal is an error."""
    human, answers, slept = load("human"), [429, 429, 200], list[float]()

    def answer(request: Request) -> str:
        code = answers.pop(0)
        if code != 200:
            raise HTTPError(request.full_url, code, "no", Message(), None)
        return "stream"

    monkeypatch.setattr(human, "urlopen", answer)
    monkeypatch.setattr(human.time, "sleep", slept.append)
    assert human.post("http://localhost/v1/run", {}) == "stream"
    assert slept == [1.0, 1.0] and not answers
    answers.append(422)
    with pytest.raises(HTTPError):
        human.post("http://localhost/v1/run", {})
