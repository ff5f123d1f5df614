"""Every API tells how many drafted tokens were accepted and rejected, by the same two names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bridle.http.aici.shapes import RunUsage
from bridle.outputs import Finished, FinishReason, Usage
from tests.http.conftest import REPLY
from tests.http.harness import NAME
from tests.waiting import PATIENCE

DRAFTED: dict[str, Any] = {"speculate": 4, "prediction": REPLY}
CHAT: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Hi"}],
    "prediction": {"type": "content", "content": REPLY},
    "speculate": 4,
}


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": NAME, "prompt": "Say", "max_tokens": 40, **DRAFTED}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": NAME, "input": "Hi", **DRAFTED}),
        ("/v1/messages", {k: v for k, v in CHAT.items() if k != "prediction"} | {"max_tokens": 40, **DRAFTED}),
        ("/generate", {"inputs": "Say it:", "parameters": {"details": True, **DRAFTED}}),
        ("/generate", {"text": "Say it:", "sampling_params": {"max_new_tokens": 40, **DRAFTED}}),
    ],
    ids=["completions", "chat", "responses", "anthropic", "tgi", "sglang"],
)
@pytest.mark.usefixtures("obeyed_drafts")
def test_answers_tell_what_was_accepted_and_what_was_not(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    counts = next(found(answer.json()))
    assert counts["accepted_prediction_tokens"] > 0
    assert counts["rejected_prediction_tokens"] >= 0


def found(value: Any) -> Iterator[dict[str, int]]:
    """The objects that have the counts, wherever they are."""
    if isinstance(value, dict):
        if "accepted_prediction_tokens" in value:
            yield value
        for inner in value.values():
            yield from found(inner)


def test_a_run_tells_them_of_all_outputs_that_are_over() -> None:
    usage = RunUsage()
    for index, (drafted, accepted) in enumerate([(5, 3), (4, 4)]):
        counts = Usage(drafted_tokens=drafted, accepted_tokens=accepted)
        usage.note(Finished("a", index, FinishReason.LENGTH, counts))
    shape = usage.shape()
    assert (shape["accepted_prediction_tokens"], shape["rejected_prediction_tokens"]) == (7, 2)
