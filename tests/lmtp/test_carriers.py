"""Servers behind carriers other than WebSockets: memory, a socket pair, a Unix-domain socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bridle.lmtp.client import Client, MemoryCarrier, SocketCarrier
from bridle.lmtp.client.carriers import Carrier
from bridle.lmtp.server import LineLink, serve_unix, socket_link
from tests.http.harness import NAME
from tests.lmtp.harness import Setup, running

Connect = Callable[[Setup, Path], Awaitable[tuple[Carrier, Callable[[], object]]]]


async def in_memory(setup: Setup, folder: Path) -> tuple[Carrier, Callable[[], object]]:
    return MemoryCarrier(setup.server.serve), lambda: None


async def over_a_pair(setup: Setup, folder: Path) -> tuple[Carrier, Callable[[], object]]:
    ours, theirs = socket.socketpair()
    task = asyncio.create_task(setup.server.serve(await socket_link(theirs)))
    return SocketCarrier(lambda: ours), task.cancel


async def over_a_path(setup: Setup, folder: Path) -> tuple[Carrier, Callable[[], object]]:
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


async def test_lines_are_cut_where_they_end() -> None:
    reader = asyncio.StreamReader()
    link = LineLink(reader, None)  # type: ignore[arg-type]  # nothing is written
    reader.feed_data(b"one\n\ntw")
    assert await link.receive() == "one"
    reader.feed_data(b"o\r\nthree\n" + "z\u00eb".encode() + b"\n\xff\n")
    assert [await link.receive() for _ in range(4)] == ["two\r", "three", "z\u00eb", "\ufffd"]
