"""Tests of `POST /v1/decide`, and of the probabilities of options in the answers of other routes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bridle.sampling_values import MAX_SCORED
from tests.http.harness import NAME, scripted_model, served

CITIES = ["Paris", "Rome", "Madrid"]
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with served(scripted_model()) as url, httpx.Client(base_url=url, timeout=60) as made:
        yield made


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": NAME, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("asked", [{"prompt": "Say"}, {"messages": HI}, {"prompt": [5, 6, 7]}])
def test_the_best_option_is_chosen(client: httpx.Client, asked: dict[str, Any]) -> None:
    answer = post(client, "/v1/decide", options=CITIES, **asked)
    assert [each["text"] for each in answer["options"]] == CITIES
    assert math.isclose(sum(each["probability"] for each in answer["options"]), 1.0)
    best = max(answer["options"], key=lambda each: each["logprob"])
    assert (answer["choice"], answer["probability"]) == (best["text"], best["probability"])
    assert answer["object"] == "decision" and answer["usage"]["prompt_tokens"] > 0


def test_a_temperature_samples_and_a_seed_repeats(client: httpx.Client) -> None:
    def choice(seed: int) -> str:
        return str(post(client, "/v1/decide", prompt="Say", options=CITIES, temperature=50.0, seed=seed)["choice"])

    found = [choice(seed) for seed in range(12)]
    assert len(set(found)) > 1
    assert [choice(seed) for seed in range(3)] == found[:3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"options": CITIES}, "prompt"),
        ({"options": CITIES, "prompt": "a", "messages": HI}, "prompt"),
        ({"options": CITIES, "prompt": ["a", "b"]}, "prompt"),
        ({"options": [], "prompt": "a"}, "options"),
        ({"options": ["a"] * (MAX_SCORED + 1), "prompt": "a"}, "options"),
        ({"options": ["a", 1], "prompt": "a"}, "options"),
        ({"options": ["a", ""], "prompt": "a"}, "options"),
        ({"options": ["a", "b", "a"], "prompt": "a"}, "options"),
        ({"options": ["a" * 600, "b"], "prompt": "a"}, "options"),
        ({"options": CITIES, "prompt": "a", "temperature": -1.0}, "temperature"),
        ({"options": CITIES, "prompt": "a", "regex": "a"}, "regex"),
        ({"prompt": "a"}, "options"),
    ],
)
def test_what_cannot_be_decided_is_refused(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/decide", json={"model": NAME, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("form", [{"choice": ["yes", "no"]}, {"guided_json": {"enum": ["yes", "no"]}}])
def test_logprobs_have_the_probabilities_of_options(client: httpx.Client, form: dict[str, Any]) -> None:
    whole = post(client, "/v1/completions", prompt="Say", logprobs=0, **form)["choices"][0]
    chat = post(client, "/v1/chat/completions", messages=HI, logprobs=True, **form)["choices"][0]
    for choice in (whole, chat):
        options = choice["logprobs"]["options"]
        assert [each["text"].strip('"') for each in options] == ["yes", "no"]
        assert math.isclose(sum(each["probability"] for each in options), 1.0)
    assert "options" not in post(client, "/v1/completions", prompt="Say", logprobs=0)["choices"][0]["logprobs"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "Say", "logprobs": 0}),
        ("/v1/chat/completions", {"messages": HI, "logprobs": True}),
    ],
)
def test_a_stream_has_them_in_its_first_chunk_with_logprobs(
    client: httpx.Client, path: str, asked: dict[str, Any]
) -> None:
    whole = post(client, path, choice=CITIES, **asked)["choices"][0]["logprobs"]["options"]
    with client.stream("POST", path, json={"model": NAME, "choice": CITIES, "stream": True, **asked}) as answer:
        lines = [line for line in answer.iter_lines() if '"options"' in line]
    assert len(lines) == 1
    for each in whole:
        assert each["text"] in lines[0]
