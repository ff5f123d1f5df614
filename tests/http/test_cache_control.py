"""Tests of prompt caching on each API: breakpoints, cache keys and lifetimes in requests, and token counts in the
usage."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle.serving.models.loading import LoadedModel
from tests.http.parked_chats import flood
from tests.http.retaining_app import LONG, an_app
from tests.http.tool_calls import BLOCK

MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
WRONG: dict[str, Any] = {"cache_control": {"type": "forever"}}
HOUR: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SHORT = "Be brief. " * 9
TOOL = {"name": "find", "description": "Finds.", "input_schema": {"type": "object"}}


def text(said: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": said, **(mark or {})}


def ask(client: TestClient, model: LoadedModel, **fields: Any) -> dict[str, Any]:
    """Ask a question after a long system prompt; returns the usage."""
    body: dict[str, Any] = {"model": model.name, "max_tokens": 4, "messages": [{"role": "user", "content": "Well?"}]}
    answer = client.post("/v1/messages", json=body | fields)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def whole(usage: dict[str, Any]) -> int:
    return sum(usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))


@pytest.mark.parametrize("mark", [None, MARK])
def test_a_prefix_up_to_a_breakpoint_outlives_a_full_cache(mark: dict[str, Any] | None) -> None:
    with an_app() as (client, model):
        system = [text(LONG, mark)]
        first = ask(client, model, system=system)
        created = first["cache_creation_input_tokens"]
        assert (first["cache_read_input_tokens"], created > 0) == (0, mark is not None)
        assert first["cache_creation"] == {"ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": 0}
        flood(client)
        again = ask(client, model, system=system, messages=[{"role": "user", "content": "Really?"}])
        assert again["cache_read_input_tokens"] == created
        assert again["cache_creation_input_tokens"] == 0
        number = len(model.tokenizer.encode(LONG, False))
        assert created == 0 or number - BLOCK <= created <= number + BLOCK
        assert model.client.statistics().num_retained == (mark is not None)
        assert whole(first) == len(model.tokenizer.encode(LONG, False)) + whole(ask(client, model, system=[text("")]))


def test_each_lifetime_is_counted_and_reads_come_first() -> None:
    with an_app() as (client, model):
        system = [text(LONG, HOUR), text(SHORT, MARK)]
        counts = ask(client, model, system=system)["cache_creation"]
        assert counts["ephemeral_1h_input_tokens"] > 0 < counts["ephemeral_5m_input_tokens"]
        usage = ask(client, model, system=[text(LONG, HOUR), text("Other. " * 20, MARK)])
        assert 0 < usage["cache_read_input_tokens"] <= counts["ephemeral_1h_input_tokens"]
        assert usage["cache_creation"]["ephemeral_1h_input_tokens"] == 0 < usage["cache_creation_input_tokens"]


def test_breakpoints_may_be_at_tools_messages_and_the_end() -> None:
    with an_app() as (client, model):
        tools = [TOOL, {**TOOL, "name": "seek", **MARK}]
        assert ask(client, model, tools=tools, system=LONG)["cache_creation_input_tokens"] > 0
        said = [{"role": "user", "content": [text(SHORT, MARK), text("Now?")]}]
        within = ask(client, model, messages=said)["cache_creation_input_tokens"]
        size = len(model.tokenizer.encode(SHORT, False))
        assert size - BLOCK <= within <= size + BLOCK
        talk = [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": [text(LONG, MARK)]},
            {"role": "user", "content": "And?"},
        ]
        size = len(model.tokenizer.encode(LONG, False))
        assert ask(client, model, messages=talk)["cache_creation_input_tokens"] >= size
        end = ask(client, model, messages=[{"role": "user", "content": LONG + "?"}], **MARK)
        assert end["cache_creation_input_tokens"] >= size - BLOCK


def test_a_conversation_that_moves_its_breakpoint_holds_one_entry() -> None:
    with an_app() as (client, model):
        said: list[Any] = []
        for number in range(4):
            said = [*said, {"role": "user", "content": [text(f"{number} {SHORT}", MARK)]}]
            usage = ask(client, model, messages=said)
            said.append({"role": "assistant", "content": "Fine."})
            flood(client)
            assert (usage["cache_read_input_tokens"] > 0) == (number > 0)
        assert model.client.statistics().num_retained == 1


def test_a_user_retains_no_more_than_the_budgets_allow() -> None:
    with an_app(max_retained=2) as (client, model):
        for number in range(4):
            assert ask(client, model, system=[text(f"{number} {LONG}", MARK)])["cache_creation_input_tokens"] > 0
        assert model.client.statistics().num_retained == 2
    with an_app(max_retained_tokens=4 * BLOCK) as (client, model):
        assert ask(client, model, system=[text(LONG, MARK)])["cache_creation_input_tokens"] == 4 * BLOCK
        assert model.client.statistics().num_parked_blocks == 4
    with an_app(max_retained=0) as (client, model):
        assert ask(client, model, system=[text(LONG, MARK)])["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"system": [text("a", WRONG)]}, "system[0].cache_control: got type 'forever'"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl: got '2h'; it must be '5m' or '1h'"),
        ({"system": [text("a", MARK)] * 5}, "more than 4 breakpoints; remove system[4].cache_control"),
        ({"prompt_cache_retention": "1y"}, "prompt_cache_retention"),
    ],
)
def test_what_is_no_breakpoint_is_refused(fields: dict[str, Any], said: str) -> None:
    with an_app() as (client, model):
        body = {"model": model.name, "max_tokens": 4, "messages": [{"role": "user", "content": "Well?"}]}
        answer = client.post("/v1/messages", json=body | fields)
        assert answer.status_code == 400
        assert said in answer.text.replace('\\"', '"')


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
    "/v1/completions": {"prompt": LONG, "max_tokens": 4},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("route", ROUTES)
def test_openai_clients_retain_a_prompt_for_a_day(route: str) -> None:
    with an_app() as (client, model):
        body = {"model": model.name, "prompt_cache_key": "k", **ROUTES[route]}
        for retention, num_retained in (("in_memory", 0), ("24h", 1)):
            for is_again in (False, True):
                usage = client.post(route, json=body | {"prompt_cache_retention": retention}).json()["usage"]
                details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
                number = usage.get("prompt_tokens") or usage["input_tokens"]
                is_cached = details["cached_tokens"] >= number - BLOCK
                assert is_cached == (num_retained > 0 and is_again)
                flood(client)
                assert model.client.statistics().num_retained == num_retained


def test_one_key_holds_one_conversation() -> None:
    with an_app() as (client, model):
        for number, key in enumerate(("a", "a", "b", "")):
            body = {"model": model.name, "prompt": f"{number} {LONG}", "max_tokens": 4}
            wanted = {"prompt_cache_retention": "24h", "prompt_cache_key": key}
            assert client.post("/v1/completions", json=body | wanted).status_code == 200
            assert model.client.statistics().num_retained == (1, 1, 2, 3)[number]
