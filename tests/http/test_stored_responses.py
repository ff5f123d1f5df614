"""Tests of stored responses: the real OpenAI client continues, reads, lists and deletes them, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bridle.config import EngineConfig
from bridle.http import create_app
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import saying, scripted_model
from tests.http.parked_chats import SAID
from tests.http.tool_calls import BLOCK, HERMES, PARAMETERS, QUESTION, TAGGED, a_tokenizer

TOOLS: Any = [{"type": "function", "name": "find", "parameters": PARAMETERS}]


@asynccontextmanager
async def clients(folder: Path, said: str = TAGGED, template: str = HERMES) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """Yield the clients of two users of one application."""
    text, keys = a_tokenizer(template), KeyStore(folder / "keys.db")
    model = scripted_model(text=text, next_token=saying(said, text), max_model_len=2048, config=EngineConfig())
    app = create_app(ModelRegistry([model]), keys=keys)
    made = []
    for user in ("alice", "bob"):
        web = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
        key = keys.add(user)
        made.append(openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=web, max_retries=0))
    try:
        yield made
    finally:
        for client in made:
            await client.close()
        keys.close()
        model.close()


async def ask(client: openai.AsyncOpenAI, said: Any, **options: Any) -> Any:
    answer = await client.responses.create(
        model="scripted", input=said, tools=TOOLS, max_output_tokens=150, temperature=0, **options
    )
    if not options.get("stream"):
        return answer
    return [event async for event in answer][-1].response


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("form", "is_stream"), [("hermes", False), ("hermes", True), ("tags", True), ("python", False)]
)
def test_a_response_is_gone_on_from_and_its_kv_with_it(tmp_path: Path, form: str, is_stream: bool) -> None:
    template, called = SAID[form]

    async def run() -> None:
        async with clients(tmp_path, called, template) as (alice, _):
            whole: list[Any] = [{"role": "user", "content": QUESTION}]
            response = await ask(alice, QUESTION, stream=is_stream)
            for _ in range(3):
                known = response.usage.input_tokens + response.usage.output_tokens
                call = response.output[-1]
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "There."}
                whole += [item.model_dump(exclude_none=True) for item in response.output] + [result]
                before = response.id
                response = await ask(alice, [result], previous_response_id=before, stream=is_stream)
                assert response.previous_response_id == before
                assert response.store is True
                assert known - response.usage.input_tokens_details.cached_tokens <= BLOCK
            again = await ask(alice, whole, store=False)  # all items at once say the same
            assert again.usage.input_tokens == response.usage.input_tokens

    asyncio.run(run())


def test_others_get_404(tmp_path: Path) -> None:
    async def run() -> None:
        async with clients(tmp_path, "Yes.") as (alice, bob):
            response = await ask(alice, "Well?")
            for call in (
                bob.responses.retrieve(response.id),
                bob.responses.delete(response.id),
                bob.responses.input_items.list(response.id),
                ask(bob, "And?", previous_response_id=response.id),
                alice.responses.retrieve("resp_unknown"),
            ):
                with pytest.raises(openai.NotFoundError, match="is kept for this user") as refused:
                    await call
                assert refused.value.code == "response_not_found"
            assert (await alice.responses.retrieve(response.id)).output_text == response.output_text

    asyncio.run(run())


def test_reading_listing_and_deleting(tmp_path: Path) -> None:
    async def run() -> None:
        async with clients(tmp_path, "Yes.") as (alice, _):
            first = await ask(alice, "One?", instructions="Be brief.", metadata={"a": "b"})
            second = await ask(alice, [{"role": "user", "content": "Two?"}], previous_response_id=first.id)
            found = await alice.responses.retrieve(first.id)
            assert found.model_dump() == first.model_dump()
            items = [item async for item in alice.responses.input_items.list(second.id, order="asc", limit=1)]
            assert [item.content[0].text for item in items] == ["One?", "Yes.", "Two?"]  # type: ignore[union-attr]
            assert len({item.id for item in items}) == 3
            page = await alice.responses.input_items.list(second.id)
            assert [item.id for item in page.data] == [item.id for item in reversed(items)]
            await alice.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await alice.responses.retrieve(first.id)
            assert "Yes" in (await ask(alice, "Three?", previous_response_id=second.id)).output_text  # it holds it all

    asyncio.run(run())


def test_what_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    async def run() -> None:
        async with clients(tmp_path, "Yes.") as (alice, _):
            response = await ask(alice, "Well?", store=False)
            assert response.store is False
            with pytest.raises(openai.NotFoundError):
                await alice.responses.retrieve(response.id)

    asyncio.run(run())


def test_many_at_once_keep_their_own(tmp_path: Path) -> None:
    async def run() -> None:
        async with clients(tmp_path, "Yes.") as (alice, bob):
            users = [alice, bob] * 4
            firsts = await asyncio.gather(*(ask(user, f"Number {i}?") for i, user in enumerate(users)))
            nexts = await asyncio.gather(
                *(ask(user, "And?", previous_response_id=first.id) for user, first in zip(users, firsts, strict=True))
            )
            for number, (user, response) in enumerate(zip(users, nexts, strict=True)):
                items = [item async for item in user.responses.input_items.list(response.id, order="asc")]
                assert items[0].content[0].text == f"Number {number}?"  # type: ignore[union-attr]

    asyncio.run(run())


BAD = [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")]


@pytest.mark.parametrize(("query", "name"), BAD)
def test_bad_pages_are_told(tmp_path: Path, query: str, name: str) -> None:
    async def run() -> None:
        async with clients(tmp_path, "Yes.") as (alice, _):
            response = await ask(alice, "Well?")
            with pytest.raises(openai.BadRequestError, match=f"{name} is"):
                await alice.get(f"/responses/{response.id}/input_items?{query}", cast_to=object)
            with pytest.raises(openai.BadRequestError, match="not streamed"):
                await alice.get(f"/responses/{response.id}?stream=true", cast_to=object)

    asyncio.run(run())
