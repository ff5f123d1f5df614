"""A batch file is checked whole, answered through the application, and its failures are answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import main
from bridle.errors import InvalidRequest
from bridle.http import create_app
from bridle.http.batch import BatchRequest, answer_batch, read_requests
from bridle.service import ModelRegistry
from tests.http.harness import saying, scripted_model


def _line(custom_id: str, url: str = "/v1/completions", **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b"{\n"], "line 1 is no request"),
        ([_line("a"), b"\n", _line("a")], "line 3 repeats custom_id 'a'"),
        ([_line("a", "/v1/models")], "line 1 asks for 'POST /v1/models'"),
        ([b'{"custom_id": 1, "url": "/generate", "body": {}}'], "line 1 is no request"),
    ],
)
def test_bad_lines_are_named(lines: list[bytes], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        list(read_requests(lines))


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


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    source.write_bytes(_line("a", **body) + _line("b", **(body | {"model": "nobody"})))
    assert main(["run-batch", str(source), "-o", str(target)]) == 1
    answers = {each["custom_id"]: each["response"] for each in map(json.loads, target.read_text().splitlines())}
    assert answers["a"]["body"]["choices"][0]["text"] == " Paris."
    assert answers["b"]["status_code"] == 404
    assert "1 answered, 1 failed" in capsys.readouterr().err
    assert main(["run-batch", str(tmp_path / "none.jsonl")]) == 2
