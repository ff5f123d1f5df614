"""`describe_constraint`: the last message of the user describes the form of the answer, on every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bridle import LLM
from bridle.chat.constraint_description import MAX_DESCRIPTION_CHARS, describe, with_description
from bridle.chat.conversation import Conversation
from bridle.errors import InvalidRequest
from bridle.structured_output import Choice, JsonObject, JsonSchema, Lark, Regex
from tests.http.harness import NAME, scripted_model, served

HI = [{"role": "user", "content": "Hi"}]
PATTERN = "(axx|byy)"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with served(scripted_model()) as url, httpx.Client(base_url=url, timeout=60) as made:
        yield made


@pytest.mark.parametrize(
    ("constraint", "part"),
    [
        (JsonSchema({"type": "integer"}), '{"type": "integer"}'),
        (JsonObject(), "a JSON object"),
        (Choice(["Größe", "b"]), '"Größe", "b"'),
        (Regex(PATTERN), PATTERN),
        (Lark('start: "a"'), "start:"),
    ],
)
def test_each_kind_is_described(constraint: Any, part: str) -> None:
    assert part in describe(constraint)


def test_the_last_message_of_the_user_gets_it() -> None:
    parts = [{"type": "text", "text": "What?"}]
    messages = [*HI, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": parts}]
    found = with_description(Conversation(messages), Regex(PATTERN)).messages
    assert found[:2] == messages[:2] and found[2]["content"][0] == parts[0]
    assert found[2]["content"][1]["text"] == describe(Regex(PATTERN)) and len(parts) == 1


@pytest.mark.parametrize(
    ("messages", "constraint"),
    [(HI, None), ([{"role": "system", "content": "a"}], Regex("a")), (HI, Choice(["a" * MAX_DESCRIPTION_CHARS]))],
)
def test_what_cannot_be_described_is_refused(messages: list[dict[str, str]], constraint: Any) -> None:
    with pytest.raises(InvalidRequest, match="describe_constraint: ") as caught:
        with_description(Conversation(messages), constraint)
    assert caught.value.param == "describe_constraint"


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/chat/completions", {"messages": HI}, ("usage", "prompt_tokens")),
        ("/v1/responses", {"input": "Hi"}, ("usage", "input_tokens")),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}, ("usage", "input_tokens")),
        ("/api/chat", {"messages": HI, "stream": False}, ("prompt_eval_count",)),
    ],
)
def test_every_api_puts_it_into_the_prompt(
    client: httpx.Client, path: str, body: dict[str, Any], where: tuple[str, ...]
) -> None:
    def size(**more: Any) -> int:
        answer = client.post(path, json={"model": NAME, "regex": PATTERN, **body, **more})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        for name in where:
            found = found[name]
        cached = answer.json().get("usage", {}).get("cache_read_input_tokens", 0)
        return int(found) + int(cached)

    assert size(describe_constraint=True) - size() > 10


def test_a_prompt_without_messages_is_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"model": NAME, "prompt": "a", "describe_constraint": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "describe_constraint"


def test_python_puts_it_into_the_prompt() -> None:
    with LLM("demo", max_model_len=512, num_blocks=256) as llm:
        (output,) = llm.chat(HI, regex="(a|b)", describe_constraint=True, max_tokens=3)
        assert "regular expression" in llm.tokenizer.decode(output.prompt_token_ids)
