"""Tests of `usage.constraint` and minimum probabilities of constraints: on each HTTP API, in Python and in traces."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bridle import LLM
from bridle.constraint_usage import ConstraintUsage
from bridle.errors import ControllerError
from bridle.structured_output import Regex
from tests.http.harness import NAME, scripted_model, served

HI = [{"role": "user", "content": "Hi"}]
TEXT = {"prompt": "Say", "regex": "(axx|byy)", "max_tokens": 20}
#: Route, further fields, and the path to the report in its answer.
ROUTES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("/v1/completions", TEXT, ("usage",)),
    ("/v1/chat/completions", {"messages": HI, "regex": "(axx|byy)"}, ("usage",)),
    ("/v1/responses", {"input": "Hi", "regex": "(axx|byy)"}, ("usage",)),
    ("/v1/messages", {"messages": HI, "max_tokens": 20, "regex": "(axx|byy)"}, ("usage",)),
    ("/api/chat", {"messages": HI, "stream": False, "regex": "(axx|byy)"}, ("usage",)),
    ("/api/generate", {"prompt": "Say", "stream": False, "regex": "(axx|byy)"}, ("usage",)),
    ("/v1/decide", {"prompt": "Say", "options": ["a", "b"]}, ("usage",)),
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with served(scripted_model()) as url, httpx.Client(base_url=url, timeout=60) as made:
        yield made


def found_at(body: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        body = body[name]
    return body


@pytest.mark.parametrize(("path", "fields", "where"), ROUTES, ids=[path for path, _, _ in ROUTES])
def test_each_route_reports_what_a_mask_took(
    client: httpx.Client, path: str, fields: dict[str, Any], where: tuple[str, ...]
) -> None:
    answer = client.post(path, json={"model": NAME, **fields, "constraint_report": True})
    assert answer.status_code == 200, answer.text
    report = found_at(answer.json(), where)["constraint"]
    assert report["masked_tokens"] == 1 and 0.0 < report["removed_probability"]["sum"] <= 1.0
    if path != "/v1/decide":
        assert report["least_likely_run"]["text"] in ("xx", "yy") and report["least_likely_run"]["logprob"] < 0.0
    silent = client.post(path, json={"model": NAME, **fields}).json()
    assert "constraint" not in silent.get("usage", {})


@pytest.mark.parametrize(("path", "fields"), [each[:2] for each in ROUTES if each[0] != "/v1/decide"])
def test_each_route_takes_lookahead(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    form = "|".join(letter * 4 for letter in string.ascii_lowercase)
    asked = {"model": NAME, **fields, "regex": f"({form})", "temperature": 0, "constraint_report": True}
    answers = [client.post(path, json=asked | {"lookahead": most}) for most in (0, 8, 65)]
    assert [answer.status_code for answer in answers] == [200, 200, 400] and "lookahead" in answers[2].text
    plain, ahead = (answer.json()["usage"]["constraint"]["least_likely_run"] for answer in answers[:2])
    assert plain["text"] != ahead["text"] and plain["logprob"] < ahead["logprob"]


@pytest.mark.parametrize(("path", "fields"), [each[:2] for each in ROUTES if each[0] != "/v1/decide"])
def test_each_route_aligns_texts(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    asked = {"model": NAME, **fields, "temperature": 1, "top_p": 1, "top_k": 0, "aligned": 20}
    answer, wrong = client.post(path, json=asked), client.post(path, json=asked | {"temperature": 0.5})
    assert (answer.status_code, wrong.status_code) == (200, 400), answer.text
    assert "temperature: got 0.5 with aligned" in wrong.text
    assert answer.json()["usage"]["constraint"]["forced_runs"] == 1


def test_generate_of_tgi_reports(client: httpx.Client) -> None:
    grammar = {"type": "regex", "value": "(axx|byy)"}
    asked = {"inputs": "Say", "parameters": {"grammar": grammar, "details": True, "constraint_report": True}}
    details = client.post("/generate", json=asked).json()["details"]
    assert details["usage"]["constraint"]["forced_runs"] == 1


def test_generate_of_sglang_reports(client: httpx.Client) -> None:
    asked = {"text": "Say", "sampling_params": {"regex": "(axx|byy)", "constraint_report": True}}
    answer = client.post("/generate", json=asked)
    assert answer.json()["meta_info"]["constraint"]["forced_runs"] == 1


def test_run_of_aici_reports(client: httpx.Client) -> None:
    asked = {"controller": "none", "controller_arg": "Say", "constraint": {"regex": "(axx|byy)"}}
    lines = client.post("/v1/run", json=asked | {"constraint_report": True}).text.split("\n\n")
    items = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert items[-1]["usage"]["constraint"]["forced_runs"] == 1


def test_a_stream_ends_with_the_report(client: httpx.Client) -> None:
    asked = {"model": NAME, **TEXT, "stream": True, "stream_options": {"include_usage": True}}
    text = client.post("/v1/completions", json=asked | {"constraint_report": True}).text
    assert '"least_likely_run"' in text


def test_a_floor_refuses_and_is_checked(client: httpx.Client) -> None:
    asked = {"model": NAME, **TEXT, "constraint_floor": -0.0001, "on_constraint_floor": "refuse"}
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 422 and "constraint_floor: got -0.0001" in answer.json()["error"]["message"]
    wrong = client.post("/v1/completions", json={**asked, "on_constraint_floor": "no"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "on_constraint_floor"


def test_a_stream_never_shows_a_run_that_is_taken_back(client: httpx.Client) -> None:
    asked = {"model": NAME, **TEXT, "constraint_floor": -0.0001, "on_constraint_floor": "rewind"}
    whole = client.post("/v1/completions", json=asked).json()
    assert whole["usage"]["constraint"]["rewound_runs"] == 2
    lines = client.post("/v1/completions", json={**asked, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_python_and_its_traces_report() -> None:
    with LLM("demo", max_model_len=256, num_blocks=256) as llm:
        (output,) = llm.generate(
            "12 + 34 = ", constraint=Regex("(4xx|5yy)"), trace=True, constraint_report=True, temperature=0.0
        )
        report = output.usage.constraint
        assert isinstance(report, ConstraintUsage) and report.noncanonical_tokens <= len(output.outputs[0].token_ids)
        assert report.least_likely is not None and output.text.endswith(report.least_likely.text)
        assert output.trace is not None
        (ending,) = [record for record in output.trace.records if hasattr(record, "constraint")]
        assert ending.constraint == report.to_dict()
        (refused,) = llm.generate(
            "12 + 34 = ", constraint=Regex("(4xx|5yy)"), constraint_floor=-1e-6, on_constraint_floor="refuse"
        )
        error = refused.outputs[0].error
        assert isinstance(error, ControllerError) and str(error).startswith("constraint_floor: got -1e-06")
