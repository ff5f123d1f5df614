"""Tests of prompt caches that clients create: contents, lifetimes, users, and refused requests."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle import LLM, InvalidRequest
from bridle.serving.models.loading import LoadedModel
from bridle.serving.prompt_caches import read_ttl
from tests.http.parked_chats import flood
from tests.http.retaining_app import LONG, an_app
from tests.http.tool_calls import BLOCK

SYSTEM = [{"role": "system", "content": LONG}]
TALK = [*SYSTEM, {"role": "user", "content": "Will it rain?"}]


def create(client: TestClient, model: LoadedModel, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/caches", json={"model": model.name, **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def cached(client: TestClient, model: LoadedModel, messages: list[Any] = TALK) -> int:
    body = {"model": model.name, "messages": messages, "max_tokens": 2}
    number: int = client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]
    return number


def test_a_cache_lives_until_it_is_deleted_and_is_found_by_its_tokens() -> None:
    with an_app() as (client, model):
        made = create(client, model, messages=SYSTEM, ttl="10m")
        held = made["usage"]["retained_tokens"]
        assert made["tokens"] - BLOCK < held <= made["tokens"]
        assert made["expires_at"] - made["created_at"] == 600 == made["ttl"]
        for _ in range(2):
            flood(client)
            assert cached(client, model) == held
        path = f"/v1/caches/{made['id']}"
        assert [each["id"] for each in client.get("/v1/caches").json()["data"]] == [made["id"]]
        assert client.get(path).json()["tokens"] == made["tokens"]
        assert client.post(f"{path}/prefetch").json()["usage"]["cached_tokens"] >= held - BLOCK
        assert client.delete(path).json()["deleted"]
        assert client.get(path).status_code == client.delete(path).status_code == 404
        flood(client)
        assert cached(client, model) == 0
        assert model.client.statistics().num_retained == 0


def test_a_prompt_and_a_whole_conversation_can_be_cached() -> None:
    with an_app() as (client, model):
        assert create(client, model, prompt=[1, 2, 3] * 20)["tokens"] == 60
        made = create(client, model, messages=TALK)
        flood(client)
        assert cached(client, model) == (made["tokens"] - 1) // BLOCK * BLOCK


def test_what_exceeds_a_budget_is_refused_and_the_limit_is_named() -> None:
    with an_app(max_retained=2, max_retained_tokens=8 * BLOCK) as (client, model):
        create(client, model, prompt=[1] * 4 * BLOCK)
        refused: list[tuple[dict[str, Any], str]] = [
            ({"prompt": [2] * 5 * BLOCK}, "at most 128 in all (max_retained_tokens)"),
            ({"prompt": [2]}, "a prompt cache needs at least 16"),
            ({"prompt": ["a", "b"]}, "got 2 prompts"),
            ({}, "exactly one of prompt and messages"),
            ({"prompt": [2] * 40, "ttl": "2d"}, "ttl: got '2d'"),
        ]
        for fields, said in refused:
            answer = client.post("/v1/caches", json={"model": model.name, **fields})
            assert (answer.status_code, said in answer.text) == (400, True), answer.text
        create(client, model, prompt=[3] * BLOCK)
        answer = client.post("/v1/caches", json={"model": model.name, "prompt": [4] * BLOCK})
        assert (answer.status_code, "at most 2 (max_retained)" in answer.text) == (400, True), answer.text
        assert len(client.get("/v1/caches").json()["data"]) == model.client.statistics().num_retained == 2


@pytest.mark.parametrize(("given", "seconds"), [(90, 90.0), ("90s", 90.0), ("5m", 300.0), ("24h", 86_400.0)])
def test_lifetimes(given: object, seconds: float) -> None:
    assert read_ttl(given) == seconds
    for wrong in ("", "m", "-5m", "0s", "25h", 0, True, None, float("nan"), "9" * 400 + "s"):
        with pytest.raises(InvalidRequest, match="ttl"):
            read_ttl(wrong)


def test_a_program_retains_a_prompt() -> None:
    with LLM("demo", max_retained=1, num_blocks=512) as llm:
        with llm.cache(LONG, ttl=60) as cache:
            assert cache.num_tokens > 0 == cache.prefetch() % 16
            assert llm.model.client.statistics().num_retained == 1
            assert llm.generate(LONG + "So", max_tokens=1)[0].usage.cached_tokens == cache.num_tokens
        with pytest.raises(InvalidRequest, match="none can be retained"):
            llm.cache("short")
        llm.generate("x", max_tokens=1)  # a step later
        assert llm.model.client.statistics().num_retained == 0
