"""Tests of stored conversations with the real OpenAI client: use, changes, limits, and privacy between users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bridle.errors import InvalidRequest, UnknownConversation
from bridle.http import HttpSettings, create_app
from bridle.http.state import HttpState
from bridle.serving import ModelRegistry
from bridle.serving.outputs import conversation_store
from bridle.serving.outputs.conversation_store import BOUNDS, ConversationStore
from bridle.serving.state_db import StateDb
from bridle.serving.tenancy.keys import KeyStore
from bridle.serving.tenancy.per_user_store import StoreBounds
from bridle.testing.clock import FakeClock
from tests.http.harness import local_client, saying, scripted_model
from tests.http.tool_calls import HERMES, a_tokenizer

Clients = tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]


def a_model() -> Any:
    text = a_tokenizer(HERMES)
    return scripted_model(text=text, next_token=saying("Yes.", text), max_model_len=2048)


@asynccontextmanager
async def clients(folder: Path) -> AsyncIterator[Clients]:
    """Yield the clients of two users of one server, which has a state file."""
    keys, model = KeyStore(folder / "keys.db"), a_model()
    app = create_app(ModelRegistry([model]), HttpSettings(state_db=folder / "state.db"), keys)
    http: HttpState = app.state.http
    made = [
        openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key=keys.add(name),
            http_client=httpx.AsyncClient(transport=httpx.ASGITransport(app=app)),
            max_retries=0,
        )
        for name in ("alice", "bob")
    ]
    try:
        yield made[0], made[1]
    finally:
        for client in made:
            await client.close()
        keys.close()
        model.close()
        http.save()


def with_clients(folder: Path, work: Callable[..., Any]) -> None:
    async def run() -> None:
        async with clients(folder) as both:
            await work(*both)

    asyncio.run(run())


async def ask(client: openai.AsyncOpenAI, said: Any, conversation: Any, **options: Any) -> Any:
    answer = await client.responses.create(
        model="scripted", input=said, conversation=conversation, temperature=0, max_output_tokens=50, **options
    )
    return [event async for event in answer][-1].response if options.get("stream") else answer


async def texts(client: openai.AsyncOpenAI, name: str) -> list[str]:
    found = [item async for item in client.conversations.items.list(name, order="asc", limit=2)]
    return [item.content[0].text for item in found]  # type: ignore[union-attr]


@pytest.mark.few(2)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("store", [True, False])
def test_responses_continue_a_conversation_and_add_to_it(tmp_path: Path, is_stream: bool, store: bool) -> None:
    async def work(alice: openai.AsyncOpenAI, _: openai.AsyncOpenAI) -> None:
        first = [{"role": "developer", "content": "Be brief."}]
        made = await alice.conversations.create(items=first, metadata={"a": "b"})  # type: ignore[arg-type,list-item]
        answers = []
        for said, named in (("One?", made.id), ([{"role": "user", "content": "Two?"}], {"id": made.id})):
            answers.append(await ask(alice, said, named, stream=is_stream, store=store))
            assert answers[-1].conversation.id == made.id
        assert await texts(alice, made.id) == ["Be brief.", "One?", "Yes.", "Two?", "Yes."]
        whole = [*first, {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]
        again = await alice.responses.create(
            model="scripted",
            input=[*whole, {"role": "user", "content": "Two?"}],
            temperature=0,  # type: ignore[arg-type]
        )
        assert again.usage.input_tokens == answers[1].usage.input_tokens  # type: ignore[union-attr]
        assert again.conversation is None

    with_clients(tmp_path, work)


def test_a_conversation_is_there_after_a_restart(tmp_path: Path) -> None:
    names: list[str] = []

    async def begin(alice: openai.AsyncOpenAI, bob: openai.AsyncOpenAI) -> None:
        names.extend([(await alice.conversations.create(metadata={"a": "b"})).id for _ in range(2)])
        await ask(alice, "One?", names[0])
        await alice.conversations.delete(names[1])

    async def again(alice: openai.AsyncOpenAI, bob: openai.AsyncOpenAI) -> None:
        assert (await alice.conversations.retrieve(names[0])).metadata == {"a": "b"}
        await ask(alice, "Two?", names[0])
        assert await texts(alice, names[0]) == ["One?", "Yes.", "Two?", "Yes."]
        with pytest.raises(openai.NotFoundError):
            await alice.conversations.retrieve(names[1])

    with_clients(tmp_path, begin)
    (tmp_path / "keys.db").unlink()
    with_clients(tmp_path, again)


def test_items_are_added_read_listed_and_removed(tmp_path: Path) -> None:
    async def work(alice: openai.AsyncOpenAI, _: openai.AsyncOpenAI) -> None:
        made = await alice.conversations.create()
        messages: Any = [{"role": "user", "content": f"{number}?", "id": f"own_{number}"} for number in range(3)]
        added = await alice.conversations.items.create(made.id, items=messages)
        assert (added.first_id, added.last_id, added.has_more) == ("own_0", "own_2", False)
        twice = await alice.conversations.items.create(made.id, items=messages[:1])
        assert twice.first_id.startswith("item_")
        page = await alice.conversations.items.list(made.id, limit=2)
        assert [item.id for item in page.data] == [twice.first_id, "own_2"]
        assert (await alice.conversations.items.retrieve("own_1", conversation_id=made.id)).content[0].text == "1?"
        left = await alice.conversations.items.delete("own_1", conversation_id=made.id)
        assert left.id == made.id
        assert await texts(alice, made.id) == ["0?", "2?", "0?"]
        with pytest.raises(openai.NotFoundError, match="has no item 'own_1'"):
            await alice.conversations.items.retrieve("own_1", conversation_id=made.id)
        assert (await alice.conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
        gone = await alice.conversations.delete(made.id)
        assert (gone.object, gone.deleted) == ("conversation.deleted", True)

    with_clients(tmp_path, work)


def test_others_get_404(tmp_path: Path) -> None:
    async def work(alice: openai.AsyncOpenAI, bob: openai.AsyncOpenAI) -> None:
        items: Any = [{"role": "user", "content": "Well?", "id": "own"}]
        name = (await alice.conversations.create(items=items)).id
        for call in (
            bob.conversations.retrieve(name),
            bob.conversations.update(name, metadata={}),
            bob.conversations.delete(name),
            bob.conversations.items.create(name, items=items),
            bob.conversations.items.list(name),
            bob.conversations.items.retrieve("own", conversation_id=name),
            bob.conversations.items.delete("own", conversation_id=name),
            ask(bob, "And?", name),
            alice.conversations.retrieve("conv_unknown"),
        ):
            with pytest.raises(openai.NotFoundError, match="is kept for this user") as refused:
                await call
            assert refused.value.code == "conversation_not_found"
        assert await texts(alice, name) == ["Well?"]

    with_clients(tmp_path, work)


def test_a_conversation_that_is_deleted_meanwhile_stays_deleted(tmp_path: Path) -> None:
    async def work(alice: openai.AsyncOpenAI, _: openai.AsyncOpenAI) -> None:
        name = (await alice.conversations.create()).id
        stream = await alice.responses.create(model="scripted", input="One?", conversation=name, stream=True)
        async for event in stream:
            if event.type == "response.created":
                await alice.conversations.delete(name)
        with pytest.raises(openai.NotFoundError):
            await alice.conversations.retrieve(name)

    with_clients(tmp_path, work)


def test_a_request_that_fails_adds_nothing_and_bad_ones_are_told() -> None:
    with local_client(a_model()) as client:
        name = client.post("/v1/conversations", json={}).json()["id"]
        body: dict[str, Any] = {"input": "One?", "conversation": name}
        first = client.post("/v1/responses", json={"input": "Zero?"}).json()["id"]
        for changes, said in (
            ({"previous_response_id": first}, "conversation: the body has both conversation and previous_response_id"),
            ({"conversation": 7}, "conversation"),
            ({"model": "other"}, "'other'"),
            ({"input": [{"type": "web_search_call"}]}, "input[0] is of type"),
        ):
            answer = client.post("/v1/responses", json=body | changes)
            assert answer.status_code >= 400
            assert said in answer.json()["error"]["message"]
        path = f"/v1/conversations/{name}/items"
        for items, said in (
            ("x", "items must be a list of objects"),
            ([{"type": "mcp_call"}], "items[0] is of type 'mcp_call'"),
            ([{"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "1"}], "items[1].call_id"),
        ):
            answer = client.post(path, json={"items": items})
            assert answer.status_code >= 400
            assert said in answer.json()["error"]["message"]
        assert client.get(path).json()["data"] == []
        too_many = {"metadata": {str(number): "" for number in range(17)}}
        assert client.post("/v1/conversations", json=too_many).status_code == 400


def test_a_websocket_continues_a_conversation() -> None:
    with local_client(a_model()) as client:
        name = client.post("/v1/conversations", json={}).json()["id"]
        with client.websocket_connect("/v1/responses") as socket:
            for number in range(3):
                body = {"type": "response.create", "input": f"{number}?", "conversation": name}
                socket.send_json({**body, "max_output_tokens": 50, "temperature": 0, "generate": number != 1})
                while (event := socket.receive_json())["type"] != "response.completed":
                    pass
                assert event["response"]["conversation"] == {"id": name}
        items = client.get(f"/v1/conversations/{name}/items", params={"order": "asc"}).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["0?", "Yes.", "2?", "Yes."]


def test_a_shortened_conversation_is_read_and_not_changed() -> None:
    with local_client(a_model()) as client:
        body = {"items": [{"role": "user", "content": "One?"}]}
        name = client.post("/v1/conversations", json=body).json()["id"]
        answer = client.post("/v1/responses/compact", json={"model": "scripted", "conversation": name}).json()
        assert [item["type"] for item in answer["output"]] == ["message", "compaction"]
        assert len(client.get(f"/v1/conversations/{name}/items").json()["data"]) == 1


# -- bounds ----------------------------------------------------------------------------------------------------


def item(size: int = 1) -> dict[str, Any]:
    return {"role": "user", "content": "x" * size}


def test_one_conversation_is_bounded_before_its_answer_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_store, "MAX_ITEMS", 3)
    monkeypatch.setattr(conversation_store, "MAX_BYTES", 4_000)
    store = ConversationStore()
    made = store.create("u", {}, [item()])
    for items in ([item()] * 3, [item(4_000)]):
        for add in (lambda: store.begin_turn("u", made.id, items), lambda: store.add(made, items)):  # noqa: B023
            with pytest.raises(InvalidRequest, match="Delete items, or begin another conversation"):
                add()
    turn = store.begin_turn("u", made.id, [item()] * 2)
    turn.end([item(), item(3_000)])  # there is room for an answer
    assert len(store.find("u", made.id).items) == 5
    with pytest.raises(InvalidRequest, match="at most 3"):
        store.begin_turn("u", made.id, [])


def test_conversations_of_a_user_are_bounded_and_over_after_their_time(tmp_path: Path) -> None:
    clock = FakeClock()
    db = StateDb(tmp_path / "state.db")
    bounds = StoreBounds(100.0, 9, 2, 1 << 20, 1 << 20)
    store = ConversationStore(bounds, clock, db.table("conversations"))
    other = store.create("bob", {}, [])
    made = [store.create("alice", {}, [item()]) for _ in range(2)]
    clock.advance(60.0)
    store.add(store.find("alice", made[0].id), [item()])  # which makes it the latest
    made.append(store.create("alice", {}, []))
    with pytest.raises(UnknownConversation):
        store.find("alice", made[1].id)
    clock.advance(60.0)
    assert len(store.find("alice", made[0].id).items) == 2
    with pytest.raises(UnknownConversation, match="100 s after their last change"):
        store.find("bob", other.id)
    db.close()
    again = StateDb(tmp_path / "state.db")
    assert sorted(row.name for row in again.rows("conversations")) == sorted([made[0].id, made[2].id])
    again.close()
    assert BOUNDS.max_bytes_of_user > 2 * conversation_store.MAX_BYTES
