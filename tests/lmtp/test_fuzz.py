"""Tests that the server survives any messages of clients, and frees all resources of clients that have disconnected."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from typing import Any

import httpx
import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from bridle.lmtp.server import LmtpEndpoint, LmtpSettings, websocket_front
from bridle.serving import LoadedModel
from tests.http.harness import NAME, scripted_model, served
from tests.waiting import PATIENCE, until_async

KINDS = [
    "GENERATE",
    "SCORE",
    "MODEL_INFO",
    "CANCEL",
    "RESUME",
    "BUFFER",
    "TOOL_RESULT",
    "TOKEN",
    "MSG",
    "generate",
    "",
    "\x00",
    "é",
]
NAMES = [NAME, "nope", "", "../../etc/passwd", "x" * 500, 5, None]
AT_ONCE = 25


class Fuzzer:
    """A generator of frames, most of which are almost valid."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def frame(self) -> str | bytes:
        pick = self.chance.random()
        if pick < 0.03:
            return self.chance.randbytes(self.chance.randrange(50))
        if pick < 0.08:
            return "".join(chr(self.chance.choice([32, 34, 91, 123, 10, 0x7F, 0x20AC, 0x1F642])) for _ in range(20))
        if pick < 0.10:
            return f"{self.chance.choice(KINDS)} " + self.chance.choice(["[", '{"a":', "1e", '"\\ud800"']) * 2_000
        text = f"{self.chance.choice(KINDS[:6] * 5 + KINDS)} {json.dumps(self.body())}"
        if self.chance.random() < 0.1:
            at = self.chance.randrange(len(text))
            text = text[:at] + self.chance.choice(["", "\n", "{", "\\", "NaN", "é"]) + text[at + 1 :]
        return text

    def body(self) -> Any:
        if self.chance.random() < 0.05:
            return self.value()
        fields: dict[str, Any] = {
            "stream_id": self.chance.choice([*range(8), "a", None, -1, 1.5, True, 1 << 80]),
            "model": self.chance.choice([NAME] * 12 + NAMES),
            "prompt": self.tokens(),
            "scored": self.tokens(),
            "max_tokens": self.chance.choice([1, 2, 5, 400, 0, -1, 1 << 60, "3", None, 2.0]),
        }
        extras = {
            "temperature": self.value,
            "top_logprobs": self.value,
            "logit_bias": lambda: {str(self.value())[:20]: self.value() for _ in range(3)},
            "text": self.value,
            "buffer": lambda: self.chance.choice(["b", "c", "d", 5]),
            "save": lambda: self.chance.choice(["b", "c", "d"]),
            "name": lambda: self.chance.choice(["b", "c", "d", ""]),
            "parent": lambda: self.chance.choice(["b", "c", "d"]),
            "length": self.value,
            "drop": lambda: self.chance.random() < 0.5,
            "key": lambda: self.chance.choice(["k", "l", 5]),
            "position": self.value,
            "stop": self.value,
            "top_p": self.value,
            "seed": self.value,
            "constraint": lambda: self.chance.choice([{"regex": "a+"}, {"regex": "("}, {"choice": ["a"]}, {}, 5]),
            "controller": self.value,
            "adapter": self.value,
            "rewind": lambda: self.chance.choice(["event", "hold", "mark"]),
            "data": lambda: self.chance.choice([{"lmtp": {}}, 5, []]),
            "unknown": self.value,
        }
        for name in self.chance.sample(sorted(extras), self.chance.choice([0, 0, 1, 1, 2, 3])):
            fields[name] = extras[name]()
        for name in self.chance.sample(sorted(fields), self.chance.choice([0, 0, 0, 0, 1])):
            del fields[name]
        return fields

    def tokens(self) -> Any:
        if self.chance.random() < 0.8:
            return [self.chance.randrange(3, 200) for _ in range(self.chance.randrange(1, 20))]
        return self.chance.choice(
            [[], [None], "Hello", "", [-1], [1 << 40], [1.5], ["a"], {}, [5] * 600, "\ud800", "é" * 99]
        )

    def value(self) -> Any:
        return self.chance.choice(
            [None, True, 0, 1, -1, 0.5, 1e308, 1 << 70, "", "a", "x" * 300, [], [1], {}, {"a": 1}, [[[]]], "nan"]
        )


async def visit(url: str, seed: int, num_frames: int) -> None:
    """Connect a client that sends random frames, reads or does not read, and disconnects in a random way."""
    fuzzer = Fuzzer(seed)
    reads = fuzzer.chance.random() < 0.8
    socket = await connect(url, compression=None, open_timeout=PATIENCE, close_timeout=5, max_size=None)
    reader = asyncio.create_task(_read(socket)) if reads else None
    try:
        for _ in range(num_frames):
            await socket.send(fuzzer.frame())
        if fuzzer.chance.random() < 0.5:
            socket.transport.abort()
    except ConnectionClosed:
        pass
    finally:
        await socket.close()
        if reader is not None:
            await reader


async def _read(socket: ClientConnection) -> None:
    try:
        async for message in socket:
            kind, _, body = str(message).partition(" ")
            assert kind in ("TOKEN", "MSG", "EVENT")
            assert isinstance(json.loads(body, parse_constant=pytest.fail), list)
            assert "internal_error" not in body
    except ConnectionClosed:
        pass


async def fuzz(url: str, num_connections: int, num_frames: int, first_seed: int) -> None:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> None:
        async with places:
            await visit(url, seed, num_frames)

    await asyncio.gather(*(one(first_seed + number) for number in range(num_connections)))


async def idle(model: LoadedModel, endpoint: LmtpEndpoint) -> None:
    """Wait until the server has noticed that all clients have disconnected, and has dropped streams with keys."""
    async with asyncio.timeout(PATIENCE):
        while True:
            now = model.client.statistics()
            if endpoint.server.num_connections == endpoint.server.num_kept == now.num_running + now.num_waiting == 0:
                return
            await asyncio.sleep(0.01)


async def run(num_connections: int, num_frames: int, max_growth: int) -> None:
    endpoints: list[LmtpEndpoint] = []
    make = websocket_front(LmtpSettings(resume_time=0.2, max_streams=6))

    def front(host: Any) -> LmtpEndpoint:
        endpoints.append(make(host))
        return endpoints[0]

    model = scripted_model()
    process = psutil.Process()
    with served(model, fronts=[front]) as url:
        address = url.replace("http", "ws") + "/"
        await fuzz(address, 2 * AT_ONCE, num_frames, 1_000_000)  # what grows once: caches, threads, pools
        await idle(model, endpoints[0])
        gc.collect()
        num_fds, memory = process.num_fds(), process.memory_info().rss
        await fuzz(address, num_connections, num_frames, 0)
        await idle(model, endpoints[0])
        gc.collect()
        now = model.client.statistics()
        assert now.num_free_blocks == now.num_blocks
        await until_async(lambda: process.num_fds() <= num_fds + 2, "few descriptors")
        assert process.memory_info().rss - memory < max_growth
        assert (await asyncio.to_thread(httpx.get, url + "/health/ready")).status_code == 200
        async with connect(address, open_timeout=PATIENCE) as socket:
            await socket.send(f'GENERATE {{"model": "{NAME}", "prompt": [5], "stream_id": 1, "max_tokens": 1}}')
            assert '"length"' in str(await socket.recv())


async def test_fuzzed_frames_leave_nothing_behind() -> None:
    await run(num_connections=8, num_frames=20, max_growth=64 << 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_hundred_thousand_fuzzed_frames() -> None:
    await run(num_connections=1_000, num_frames=100, max_growth=64 << 20)
