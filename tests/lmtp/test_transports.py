"""Tests of servers with other transports than WebSockets: memory, a socket pair, and a Unix domain socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from bridle.lmtp.client import Client, MemoryCarrier, SocketCarrier
from bridle.lmtp.client.transports import Transport
from bridle.lmtp.messages import MAX_MESSAGE_BYTES
from bridle.lmtp.server import LineChannel, serve_unix, socket_link, stdio_link
from tests.http.harness import NAME
from tests.lmtp.harness import Setup, running

Connect = Callable[[Setup, Path], Awaitable[tuple[Transport, Callable[[], object]]]]


async def in_memory(setup: Setup, folder: Path) -> tuple[Transport, Callable[[], object]]:
    return MemoryCarrier(setup.server.serve), lambda: None


async def over_a_pair(setup: Setup, folder: Path) -> tuple[Transport, Callable[[], object]]:
    ours, theirs = socket.socketpair()
    task = asyncio.create_task(setup.server.serve(await socket_link(theirs)))
    return SocketCarrier(lambda: ours), task.cancel


async def over_a_path(setup: Setup, folder: Path) -> tuple[Transport, Callable[[], object]]:
    path = str(folder / "lmtp")
    listener = await serve_unix(setup.server, path)
    return SocketCarrier.unix(path), listener.close


@pytest.mark.parametrize("connect", [in_memory, over_a_pair, over_a_path])
async def test_a_client_is_served(connect: Connect, tmp_path: Path) -> None:
    async with running() as setup:
        expected = [body["token"] for body in await setup.connect().ask("GENERATE", prompt=[5, 6], max_tokens=8)]
        carrier, end = await connect(setup, tmp_path)
        async with Client(carrier) as client:
            streams = [await client.generate([5, 6], model=NAME, max_tokens=8) for _ in range(3)]
            for stream in streams:
                assert [token.token async for token in stream] == expected
            assert (await client.model_info(NAME))["model"] == NAME
        end()


async def test_standard_input_and_output() -> None:
    """The server uses pipes of a parent process. A line that is too long is ignored, and the next line is read."""
    (from_parent, to_child), (from_child, to_parent) = os.pipe(), os.pipe()
    with ExitStack() as files:
        source, parent_in = (files.enter_context(os.fdopen(each, "rb")) for each in (from_parent, from_child))
        sink, parent_out = (files.enter_context(os.fdopen(each, "wb")) for each in (to_parent, to_child))
        async with running() as setup:
            task = asyncio.create_task(setup.server.serve(await stdio_link(source, sink)))
            message = f'GENERATE {{"model": "{NAME}", "prompt": [5, 6], "stream_id": 1, "max_tokens": 1}}\n'
            await asyncio.to_thread(parent_out.write, b"x" * (MAX_MESSAGE_BYTES + 1) + b"\n\n" + message.encode())
            await asyncio.to_thread(parent_out.flush)
            lines = [await asyncio.to_thread(parent_in.readline) for _ in range(2)]
            assert [line.partition(b" ")[0] for line in lines] == [b"MSG", b"TOKEN"]
            parent_out.close()
            await task


async def test_lines_are_cut_where_they_end() -> None:
    reader = asyncio.StreamReader()
    link = LineChannel(reader, None)  # type: ignore[arg-type]  # nothing is written
    reader.feed_data(b"one\n\ntw")
    assert await link.receive() == "one"
    reader.feed_data(b"o\r\nthree\n" + "z\u00eb".encode() + b"\n\xff\n")
    assert [await link.receive() for _ in range(4)] == ["two\r", "three", "z\u00eb", "\ufffd"]
