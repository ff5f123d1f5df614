"""An LMTP server in this process with a scripted model, and a client that sends lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from bridle.lmtp.client import memory_pair
from bridle.lmtp.client.transports import MemoryLink
from bridle.lmtp.server import LmtpServer, LmtpSettings, LocalHost
from bridle.serving import Admission, LoadedModel, ModelRegistry
from bridle.serving.tenancy.keys import Identity
from tests.http.harness import NAME, scripted_model
from tests.waiting import PATIENCE

Object = dict[str, Any]
SECONDS = PATIENCE


class Wire:
    """The client's end of a link, which sends lines and receives objects."""

    def __init__(self, link: MemoryLink) -> None:
        self.link = link
        self.frames: list[str] = []
        self.tells_waiting = False
        self._objects: list[tuple[str, Object]] = []

    async def send(self, kind: str, body: Any = None, **fields: Any) -> None:
        """Send a message with the given fields and `model`."""
        if body is None:
            body = {"model": NAME, **fields}
        await self.link.send(f"{kind} {body if isinstance(body, str) else json.dumps(body)}")

    async def next(self) -> tuple[str, Object]:
        """Return the next object from the server, with its type. Reports of waiting requests are ignored unless
        `tells_waiting`, because they depend on the machine."""
        found = await self._next()
        while found[1].get("event") == "queued" and not self.tells_waiting:
            found = await self._next()
        return found

    async def _next(self) -> tuple[str, Object]:
        while not self._objects:
            async with asyncio.timeout(SECONDS):
                frame = await self.link.receive()
            self.frames.append(frame)
            kind, _, text = frame.partition(" ")
            self._objects = [(kind, each) for each in json.loads(text, parse_constant=_no_constant)]
        return self._objects.pop(0)

    async def stream(self, stream_id: Any = 1) -> list[Object]:
        """Return all objects of one stream up to its end. Objects of other streams are skipped."""
        found = []
        while True:
            kind, body = await self.next()
            if body.get("stream_id") != stream_id:
                continue
            found.append({"kind": kind, **body} if kind != "TOKEN" else body)
            if kind == "MSG" or "error" in body or body.get("finish_reason"):
                return found

    async def ask(self, kind: str, **fields: Any) -> list[Object]:
        """Send a request, and read its stream."""
        await self.send(kind, **{"stream_id": 1, **fields})
        return await self.stream(fields.get("stream_id", 1))

    async def hello(self) -> Object:
        """Tell the server that this client knows the protocol's extensions."""
        await self.send("MODEL_INFO", stream_id="hello", data={"lmtp": {"version": 1}})
        return (await self.stream("hello"))[0]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Setup:
    """A server with a model, and clients of it."""

    def __init__(self, model: LoadedModel, settings: LmtpSettings | None = None, admission: Admission | None = None):
        self.model = model
        self.registry = ModelRegistry([model])
        self.admission = admission or Admission()
        self.host = LocalHost(self.registry, self.admission)
        self.server = LmtpServer(self.host, settings)
        self._tasks: list[asyncio.Task[None]] = []

    def connect(self, user: str = "ann") -> Wire:
        ours, theirs = memory_pair(1 << 20)
        self._tasks.append(asyncio.create_task(self.server.serve(theirs, Identity(user, False))))
        return Wire(ours)

    async def settle(self) -> None:
        """Wait until no request runs and every KV block is free or cached."""
        async with asyncio.timeout(SECONDS):
            while True:
                now = self.model.client.statistics()
                if now.num_running == 0 and now.num_waiting == 0 and self.admission.num_requests == 0:
                    return
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        await self.server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.registry.close()


@contextlib.asynccontextmanager
async def running(
    model: LoadedModel | None = None, settings: LmtpSettings | None = None, admission: Admission | None = None
) -> AsyncIterator[Setup]:
    """Yield a server of `model`, which is a scripted model by default."""
    setup = Setup(model or scripted_model(), settings, admission)
    try:
        yield setup
    finally:
        await setup.close()
