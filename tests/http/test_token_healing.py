"""Tests of token healing on each HTTP API and in LMTP: the answer continues the last word of the prompt."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

CUT = "My favorite col"
CHAT = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": CUT}]
LIMITS = {"temperature": 0, "max_tokens": 6}
#: Route, its body, and the path to the text of the answer.
ROUTES: list[tuple[str, dict[str, Any], tuple[str | int, ...]]] = [
    ("/v1/completions", {"prompt": CUT, **LIMITS}, ("choices", 0, "text")),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": False, **LIMITS},
        ("choices", 0, "message", "content"),
    ),
    ("/v1/messages", {"messages": CHAT, **LIMITS}, ("content", 0, "text")),
    (
        "/api/generate",
        {"prompt": CUT, "raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 6}},
        ("response",),
    ),
]


def answer_of(client: httpx.Client, path: str, body: dict[str, Any], where: tuple[str | int, ...]) -> str:
    answer = client.post(path, json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for name in where:
        found = found[name]
    return str(found)


@pytest.fixture(scope="module")
def client(demo_server: str) -> httpx.Client:
    return httpx.Client(base_url=demo_server, timeout=60)


@pytest.mark.parametrize(("path", "body", "where"), ROUTES, ids=[path for path, _, _ in ROUTES])
def test_an_answer_goes_on_within_a_word(
    client: httpx.Client, path: str, body: dict[str, Any], where: tuple[str | int, ...]
) -> None:
    assert answer_of(client, path, {**body, "token_healing": True}, where).startswith("or")
    assert not answer_of(client, path, body, where).startswith("or")


def test_generate_of_tgi_heals(client: httpx.Client) -> None:
    asked = {"inputs": CUT, "parameters": {"max_new_tokens": 6}}
    plain = client.post("/generate", json=asked).json()["generated_text"]
    asked["parameters"] = {"max_new_tokens": 6, "token_healing": True}
    assert client.post("/generate", json=asked).json()["generated_text"].startswith("or") > plain.startswith("or")


def test_run_of_aici_heals(client: httpx.Client) -> None:
    asked = {"controller": "none", "controller_arg": CUT, "temperature": 0, "max_tokens": 6, "token_healing": True}
    assert '"text":"or' in client.post("/v1/run", json=asked).text.replace('": "', '":"')


def test_a_tool_cannot_be_called_by_it(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    asked = {"model": "demo", "messages": CHAT[:1], "tools": [tool], "tool_choice": "required", "token_healing": True}
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "token_healing"
