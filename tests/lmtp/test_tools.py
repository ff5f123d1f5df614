"""Tools under GENERATE: the operator's answer into the stream, a client is told of the calls that it has to answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bridle.tools import ToolDesk, function_tools
from tests.http.harness import scripted_model
from tests.http.test_tools import Says
from tests.lmtp.harness import Object, Setup, Wire, running


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    desk = ToolDesk(function_tools({"greet": lambda: "hi"}))
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
    assert "client_tools has 'greet', which is a tool of the server's" in refused["error"]
