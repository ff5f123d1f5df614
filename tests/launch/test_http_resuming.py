"""Tests that HTTP clients that ask for it are notified of a lost shard, and still get the whole text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bridle.errors import ShardUnavailable
from tests.http.harness import saying, scripted_model, served
from tests.waiting import PATIENCE

REPLY = "one two three four five six seven eight"


def chunks(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", url + path, json=body, timeout=PATIENCE) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_resuming_is_told_to_those_who_ask(route: str, wants: bool) -> None:
    model = scripted_model(next_token=saying(REPLY), faults={3: ShardUnavailable("gone")})
    body: dict[str, Any] = {"model": model.name, "stream": True, "max_tokens": 60, "temperature": 0}
    body["stream_options"] = {"include_resuming": wants}
    body |= {"messages": [{"role": "user", "content": "Q"}]} if "chat" in route else {"prompt": "Q"}
    with served(model) as url:
        choices = [chunk["choices"][0] for chunk in chunks(url, f"/v1/{route}", body)]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    assert text == REPLY
    assert [choice["resuming"] for choice in choices if "resuming" in choice] == [True] * wants
