"""A batch file is checked as a whole and answered through the application; failed requests get answers with errors."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import main
from bridle.controller_tools import ToolExecutor, function_tools
from bridle.errors import InvalidRequest
from bridle.http import HttpSettings, create_app
from bridle.http.openai.batch import URLS, BatchRequest, answer_batch, batch_settings, read_requests
from bridle.serving import ModelRegistry
from bridle.traces import read
from bridle.traces.replay_text import rebuild
from tests.http.harness import saying, scripted_model
from tests.http.routes import ROUTES, of_eight
from tests.http.tool_calls import Says


def _line(custom_id: str, url: str = "/v1/completions", **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b"{\n"], "line 1 is not a batch request"),
        ([_line("a"), b"\n", _line("a")], "line 3 repeats custom_id 'a'"),
        ([_line("a", client_tools=["ask"])], "line 1 has client_tools, but in a batch no client answers tool calls"),
        ([_line("a", "/generate", parameters={"client_tools": ["ask"]})], "line 1 has client_tools"),
        ([_line("a", "/v1/models")], "line 1 requests 'POST /v1/models'"),
        ([b'{"custom_id": 1, "url": "/generate", "body": {}}'], "line 1 is not a batch request"),
        ([_line("a"), b'{"custom_id": "\xff", "url": "/generate", "body": {}}'], "line 2 is not a batch request"),
        ([b'{"custom_id": "a", "url": "/generate", "body": {"a": ' + b"[" * 100_000], "line 1 is not a batch request"),
    ],
)
def test_bad_lines_are_named(lines: list[bytes], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        list(read_requests(lines))


def test_a_mark_at_the_beginning_of_the_file_is_no_line() -> None:
    lines = [codecs.BOM_UTF8 + _line("a"), _line("b")]
    assert [request.custom_id for request in read_requests(lines)] == ["a", "b"]


async def test_answers_come_for_each_request_whatever_becomes_of_it() -> None:
    model = scripted_model(next_token=saying("Hello."))
    app = create_app(ModelRegistry([model]))
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    requests = [BatchRequest(f"good{i}", "/v1/chat/completions", chat) for i in range(9)]
    requests.append(BatchRequest("bad", "/v1/completions", {"prompt": "x", "temperature": -1}))
    requests.append(BatchRequest("native", "/generate", {"inputs": "Hi"}))
    answers = {each["custom_id"]: each["response"] async for each in answer_batch(app, requests, 3)}
    model.close()
    assert len(answers) == 11 and all(answers[f"good{i}"]["status_code"] == 200 for i in range(9))
    assert answers["good0"]["body"]["choices"][0]["message"]["content"] == "Hello."
    assert answers["good0"]["request_id"]
    assert answers["bad"]["status_code"] == 400 and "temperature" in answers["bad"]["body"]["error"]["message"]
    assert answers["native"]["body"]["generated_text"] == "Hello."


async def test_lines_of_many_prompts_are_no_crowd() -> None:
    model = scripted_model(next_token=saying("Hello."))
    app = create_app(ModelRegistry([model]), batch_settings(2))
    requests = [BatchRequest(f"{i}", "/v1/completions", {"prompt": ["Say"] * 5}) for i in range(4)]
    answers = [each["response"] async for each in answer_batch(app, requests, 2)]
    model.close()
    assert [answer["status_code"] for answer in answers] == [200] * 4
    assert all(choice["text"] == "Hello." for answer in answers for choice in answer["body"]["choices"])


async def test_lines_call_the_operators_tools() -> None:
    desk = ToolExecutor(function_tools({"greet": lambda: "hi"}))
    model = scripted_model(tools=desk)
    app = create_app(ModelRegistry([model]), HttpSettings(controller_classes={"Says": Says}))
    requests = []
    for url in sorted(URLS & ROUTES.keys()):
        body = ROUTES[url][0] | of_eight(url, {"controller": "class:Says", "controller_arg": "greet"})
        whole = {"inputs": "Say", "parameters": body} if url == "/generate" else body
        requests.append(BatchRequest(url, url, whole))
    answers = {each["custom_id"]: each["response"] async for each in answer_batch(app, requests, 2)}
    model.close()
    desk.close()
    assert len(answers) == 5 and {each["status_code"] for each in answers.values()} == {200}, answers
    assert all('"hi"' in json.dumps(each["body"]) for each in answers.values())
    assert desk.counts()["greet"].num_calls == 5


def test_a_file_of_tools_is_read_before_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, tools = tmp_path / "in.jsonl", tmp_path / "tools.toml"
    source.write_bytes(_line("a", prompt="x"))
    tools.write_text("[tools.x]\n", encoding="utf-8")
    assert main(["run-batch", str(source), "--tools", str(tools), "--model", "nothing"]) == 2
    assert "tools.x must have one of python, http, mcp, client" in capsys.readouterr().err


def test_a_batch_file_is_answered_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    source.write_bytes(_line("a", **body) + _line("b", **(body | {"model": "nobody"})))
    traces = tmp_path / "traces"
    assert main(["run-batch", str(source), "-o", str(target), "--trace", str(traces)]) == 1
    answers = {each["custom_id"]: each["response"] for each in map(json.loads, target.read_text().splitlines())}
    assert answers["a"]["body"]["choices"][0]["text"] == " Paris."
    assert answers["b"]["status_code"] == 404
    assert "1 answered, 1 failed" in capsys.readouterr().err
    ((trace,),) = map(read, traces.iterdir())
    assert rebuild(trace)[0].text == " Paris."
    assert [path.stem for path in traces.iterdir()] == [answers["a"]["request_id"]]
    assert main(["run-batch", str(tmp_path / "none.jsonl")]) == 2


@pytest.mark.parametrize(
    ("line", "is_started"),
    [
        (_line("a", prompt="x"), False),
        (_line("a", prompt="x", controller="stop"), True),
        (_line("a", "/generate", inputs="x", parameters={"controller": "stop"}), True),
    ],
)
def test_the_control_runtime_is_there_if_it_is_asked_for(
    line: bytes, is_started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def load(*_: object, control: object, **__: object) -> None:
        seen.append(control)
        raise InvalidRequest("no further")

    monkeypatch.setattr("bridle.serving.models.loading.load_model", load)
    (tmp_path / "in.jsonl").write_bytes(line)
    assert main(["run-batch", str(tmp_path / "in.jsonl"), "--control-store", str(tmp_path)]) == 2
    assert [control is not None and control.store == tmp_path for control in seen] == [is_started]


async def test_lines_search_beams() -> None:
    model = scripted_model()
    app = create_app(ModelRegistry([model]))
    asked = {"max_tokens": 5, "use_beam_search": True, "best_of": 4, "n": 2, "seed": 1}
    bodies = {
        "/v1/completions": asked | {"prompt": "Say"},
        "/v1/chat/completions": asked | {"messages": [{"role": "user", "content": "Say"}]},
    }
    requests = [BatchRequest(url, url, body) for url, body in bodies.items()]
    refused = BatchRequest("/generate", "/generate", {"inputs": "Say", "parameters": {"use_beam_search": True}})
    answers = {each["custom_id"]: each["response"] async for each in answer_batch(app, [*requests, refused], 3)}
    model.close()
    for url in bodies:
        choices = answers[url]["body"]["choices"]
        assert len(choices) == 2 and choices[0]["score"] >= choices[1]["score"], answers[url]
    assert answers["/generate"]["status_code"] == 422 and "beam search works on" in str(answers["/generate"]["body"])


@pytest.mark.parametrize("flags", [[], ["-i"], ["--input-file"]])
def test_the_file_is_named_as_elsewhere_too(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's command has flags for both the input and the output file. Nothing is loaded for an invalid file."""
    (tmp_path / "in.jsonl").write_text("{")
    assert main(["run-batch", *flags, str(tmp_path / "in.jsonl"), "--output-file", str(tmp_path / "out.jsonl")]) == 2
    assert "line 1 is not a batch request" in capsys.readouterr().err


def test_a_second_file_is_told_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-batch", "in.jsonl", "out.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "run-batch takes no more words, but got 'out.jsonl'; --output FILE says where the answers go" in said
