"""Tests of the client over real sockets and a network that delays, throttles and resets: no token arrives twice, and
none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from bridle.lmtp import Client, RetryPolicy
from bridle.lmtp.server import websocket_front
from tests.conftest import IS_FULL
from tests.http.harness import NAME, scripted_model, served

NUM_REQUESTS = 10_000 if IS_FULL else 200
NUM_CLIENTS = 8
PATIENT = RetryPolicy(backoff=0.001, max_backoff=0.05, retries=100, connect_attempts=20)


class BadNetwork:
    """A proxy that forwards data to a server in random pieces, some of them late, and resets most connections at some
    time."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_resets = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        both = [self._forward(reader, up_writer), self._forward(up_reader, writer)]
        forwarding = [asyncio.ensure_future(each) for each in both]
        try:
            await asyncio.wait(forwarding, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in forwarding:
                each.cancel()
            await asyncio.gather(*forwarding, return_exceptions=True)
            for end in (writer, up_writer):
                end.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self._random.choice([300, 2_000, 10_000, 100_000])
        while data := await reader.read(self._random.choice([1, 7, 100, 4096])):
            left -= len(data)
            if left < 0:
                self.num_resets += 1
                writer.write(data[:left])
                return
            if self._random.random() < 0.01:
                await asyncio.sleep(0.001)
            writer.write(data)
            await writer.drain()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(scripted_model(), fronts=[websocket_front()]) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.few(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plain", [False, True], ids=["resuming", "plain"])
async def test_no_token_is_lost_or_repeated(port: int, plain: bool) -> None:
    prompts = [[1 + number % 50, 2] for number in range(NUM_REQUESTS)]
    async with Client(f"127.0.0.1:{port}", NAME) as client:
        known = {tuple(prompt): await tokens_of(client, prompt) for prompt in prompts[:50]}
    network = BadNetwork(port, seed=1)
    async with network.open() as endpoint, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Client(endpoint, NAME, patience=PATIENT, plain=plain))
            for _ in range(NUM_CLIENTS)
        ]
        for begin in range(0, NUM_REQUESTS, 100):
            batch = prompts[begin : begin + 100]
            work = (tokens_of(clients[number % NUM_CLIENTS], prompt) for number, prompt in enumerate(batch))
            for prompt, tokens in zip(batch, await asyncio.gather(*work), strict=True):
                assert known[tuple(prompt)] == tokens
    assert network.num_resets > 5


async def tokens_of(client: Client, prompt: list[int]) -> list[int | None]:
    stream = await client.generate(prompt, max_tokens=5, logit_bias={2: -100.0})
    return [token.token for token in await stream.read()]
