"""Property tests of the client: streams keep their order when interleaved, and each token arrives once if a connection
is cut."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.lmtp import Client, RetryPolicy
from bridle.lmtp.client import ClientChannel, MemoryCarrier
from bridle.lmtp.server import LmtpServer, LocalHost
from bridle.serving import Admission, ModelRegistry
from tests.http.harness import NAME, scripted_model
from tests.lmtp.fakes import CutCarrier, GenuineLike, continuation

QUICK = RetryPolicy(backoff=0.0, retries=50, connect_attempts=10)  # more than there are cuts
PROMPTS = st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), min_size=1, max_size=5)
CUTS = st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 1500)), max_size=4)


async def read_all(client: Client, prompts: list[list[int]], length: int, **options: Any) -> list[list[int | None]]:
    async def one(prompt: list[int]) -> list[int | None]:
        stream = await client.generate(prompt, max_tokens=length, **options)
        tokens = await stream.read()
        assert [token.position for token in tokens] == list(range(len(tokens)))
        assert stream.finish_reason is not None and tokens[-1].finish_reason == stream.finish_reason
        return [token.token for token in tokens]

    return await asyncio.gather(*map(one, prompts))


@given(prompts=PROMPTS, length=st.integers(1, 8), cuts=CUTS, leak=st.integers(0, 3))
def test_old_server_cut_anywhere_gives_each_token_once(
    prompts: list[list[int]], length: int, cuts: list[tuple[int, int]], leak: int
) -> None:
    async def main() -> None:
        carrier = CutCarrier(GenuineLike(leak=leak).carrier, cuts)
        async with Client(carrier, "m", patience=QUICK) as client:
            results = await read_all(client, prompts, length)
        assert results == [continuation(prompt, length) for prompt in prompts]

    asyncio.run(main())


@given(scored=st.lists(st.integers(1, 90), min_size=1, max_size=6), cuts=CUTS)
def test_scores_cut_anywhere_come_once(scored: list[int], cuts: list[tuple[int, int]]) -> None:
    async def main() -> None:
        async with Client(CutCarrier(GenuineLike().carrier, cuts), "m", patience=QUICK) as client:
            assert [token.token for token in await client.score([1, 2], scored)] == scored

    asyncio.run(main())


@given(seed=st.integers(0, 1 << 30), prompts=PROMPTS, length=st.integers(1, 6))
def test_any_interleaving_keeps_the_order_within_each_stream(seed: int, prompts: list[list[int]], length: int) -> None:
    async def main() -> None:
        async with Client(MemoryCarrier(Shuffling(seed, len(prompts)).serve), "m", patience=QUICK) as client:
            results = await read_all(client, prompts, length)
        assert results == [continuation(prompt, length) for prompt in prompts]

    asyncio.run(main())


class Shuffling:
    """A server that reads all requests first, and then answers them in random order, with several objects per frame."""

    def __init__(self, seed: int, num_streams: int) -> None:
        self._random = random.Random(seed)
        self._num_streams = num_streams
        self._real = GenuineLike()

    async def serve(self, link: ClientChannel) -> None:
        waiting: list[deque[str]] = []
        while len(waiting) < self._num_streams:
            line = await link.receive()
            frames = deque(self._real.answers(line))
            if line.startswith("GENERATE"):
                waiting.append(frames)
            else:
                await link.send(frames.popleft())
        while waiting:
            chosen = self._random.choices(waiting, k=self._random.randint(1, 3))
            objects = [each.popleft().partition(" ")[2][1:-1] for each in chosen if each]
            await link.send(f"TOKEN [{', '.join(objects)}]")
            waiting = [each for each in waiting if each]
        await link.receive()


@pytest.fixture(scope="module")
def registry() -> Iterator[ModelRegistry]:
    registry = ModelRegistry([scripted_model()])
    yield registry
    registry.close()


@given(prompts=PROMPTS, length=st.integers(1, 8), cuts=CUTS, as_text=st.booleans())
def test_own_server_cut_anywhere_gives_each_token_once(
    registry: ModelRegistry, prompts: list[list[int]], length: int, cuts: list[tuple[int, int]], as_text: bool
) -> None:
    async def main() -> None:
        server = LmtpServer(LocalHost(registry, Admission()))
        options = {"text": True, "temperature": 1.0, "seed": 3} if as_text else {}
        async with Client(MemoryCarrier(server.serve), NAME, patience=QUICK) as client:
            expected = await read_all(client, prompts, length, **options)
        carrier = CutCarrier(MemoryCarrier(server.serve), cuts)
        async with Client(carrier, NAME, patience=QUICK) as client:
            assert await read_all(client, prompts, length, **options) == expected
        await server.close()

    asyncio.run(main())
