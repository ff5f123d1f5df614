"""Tests of tools with GENERATE: results of the operator's tools go into the stream, and a client receives the calls
that it must answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bridle.controller_tools import ToolExecutor, function_tools
from bridle.errors import BridleError
from bridle.lmtp.client import Client, MemoryCarrier
from bridle.lmtp.messages import EventMessage
from tests.http.harness import NAME, scripted_model
from tests.http.tool_calls import Says
from tests.lmtp.harness import Object, Setup, Wire, running
from tests.waiting import until_async


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    desk = ToolExecutor(function_tools({"greet": lambda: "hi"}))
    async with running(scripted_model(tools=desk)) as setup:
        setup.host.classes = {"Says": Says}
        yield setup
    desk.close()


async def begin(wire: Wire, tool: str, **fields: object) -> None:
    asked = {"prompt": "x", "text": True, "controller": "class:Says", "controller_arg": tool, "max_tokens": 8}
    await wire.send("GENERATE", stream_id=1, **asked, **fields)


def text_of(found: list[Object]) -> str:
    return "".join(body.get("text") or "" for body in found)


async def test_a_tool_answers_into_a_stream(setup: Setup) -> None:
    wire = setup.connect()
    await wire.hello()
    await begin(wire, "greet")
    assert text_of(await wire.stream()) == "hi"


@pytest.mark.parametrize("rewind", ["hold", "event"])
async def test_a_client_is_told_of_the_calls_that_it_answers(setup: Setup, rewind: str) -> None:
    wire, desk = setup.connect(), setup.model.tools
    await wire.hello()
    await begin(wire, "ask", client_tools=["ask"], rewind=rewind)
    kind, event = await wire.next()
    told = {"event": "tool_call", "stream_id": 1, "branch": 0, "name": "ask", "arguments": {}}
    assert (kind, event) == ("EVENT", told | {"id": event["id"]})
    assert desk is not None and desk.waits_for(event["id"], "ann") and not desk.waits_for(event["id"], "bob")
    desk.answer(event["id"], "ann", "yes")
    assert text_of(await wire.stream()) == "yes"


async def test_names_of_the_servers_tools_are_refused(setup: Setup) -> None:
    wire = setup.connect()
    await wire.hello()
    await begin(wire, "greet", client_tools=["greet"])
    (refused,) = await wire.stream()
    assert "client_tools has 'greet', but a tool of the server has this name" in refused["error"]


@pytest.mark.parametrize("fields", [{"result": "yes"}, {"result": {"b": 1}}, {"error": "nobody is there"}], ids=str)
async def test_a_client_answers_on_its_connection(setup: Setup, fields: Object) -> None:
    wire = setup.connect()
    assert (await wire.hello())["model_info"]["lmtp"]["tool_results"] is True
    await begin(wire, "ask", client_tools=["ask"])
    _, event = await wire.next()
    await wire.send("TOOL_RESULT", {"stream_id": 2, "id": event["id"], **fields})
    assert await wire.next() == ("MSG", {"stream_id": 2, "tool_result": event["id"]})
    expected = {"yes": "yes", "{'b': 1}": '{"b": 1}', "None": "refused"}[str(fields.get("result"))]
    assert text_of(await wire.stream()) == expected
    (again,) = await wire.ask("TOOL_RESULT", id=event["id"], result="late")
    assert "of this user waits for an answer" in again["error"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"id": "x"}, "no tool call 'x' of this user waits for an answer"),
        ({}, "'id' is missing"),
        ({"id": 7}, "id is 7"),
        ({"id": "x", "error": 1}, "error is 1; must be text"),
        ({"id": "x", "error": "a", "result": "b"}, "both result and error"),
    ],
    ids=str,
)
async def test_answers_to_nothing_are_refused_and_the_connection_stays(setup: Setup, fields: Object, why: str) -> None:
    wire = setup.connect()
    await wire.send("TOOL_RESULT", {"stream_id": 2, **fields})
    kind, body = await wire.next()
    assert kind == "MSG" and why in body["error"]
    await wire.hello()


async def test_our_client_answers(setup: Setup) -> None:
    """bridle's client answers a tool call while it reads the stream with the call."""
    async with Client(MemoryCarrier(setup.server.serve), NAME) as client:
        asked = {"controller": "class:Says", "controller_arg": "ask", "client_tools": ["ask"], "max_tokens": 8}
        stream = await client.generate("x", text=True, **asked)
        events: asyncio.Queue[EventMessage] = asyncio.Queue()
        client.on_event = events.put_nowait
        reading = asyncio.create_task(stream.text())
        event = await events.get()
        await client.answer(event.data["id"], "yes")
        assert await reading == "yes"
        with pytest.raises(BridleError, match="waits for an answer"):
            await client.answer(event.data["id"], "late")


async def test_a_client_of_the_original_protocol_is_told_of_no_call(setup: Setup) -> None:
    """The stream waits for a tool result over HTTP. The server sends no message that LMQL's protocol lacks."""
    wire, desk = setup.connect(), setup.model.tools
    await begin(wire, "ask", client_tools=["ask"])
    assert desk is not None
    await until_async(lambda: bool(desk.asked_of("ann")))
    desk.answer(desk.asked_of("ann")[0][0], "ann", "yes")
    assert text_of(await wire.stream()) == "yes"
    assert {frame.partition(" ")[0] for frame in wire.frames} == {"TOKEN"}
