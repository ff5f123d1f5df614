"""The LMTP front-end: serves links of any carrier over the models of one registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from bridle.errors import EngineClosed
from bridle.lmtp.server.connection import ServerChannel, ServerConnection
from bridle.lmtp.server.resumable_stream import ReplayBuffer
from bridle.lmtp.server.settings import LmtpSettings
from bridle.lmtp.server.streams import ServerContext
from bridle.serving.lifecycle.request_lifecycle import AppState
from bridle.serving.tenancy.keys import LOCAL_USER, Identity

_END_SECONDS = 2.0


#: A host for servers that stand alone, without HTTP.
LocalHost = AppState


class LmtpServer:
    """Serves any number of connections. `host` provides the models and the admission, and says whether new requests are
    accepted. `echo` is called with each message of a client.

        server = LmtpServer(LocalHost(registry, Admission()))
        await server.serve(link)
    """

    def __init__(
        self, host: AppState, settings: LmtpSettings | None = None, echo: Callable[[str], None] | None = None
    ) -> None:
        settings = settings or LmtpSettings()
        self.settings = settings
        self.home = ServerContext(host, settings, ReplayBuffer(settings))
        self._echo = echo
        self._connections: set[ServerConnection] = set()
        self._ended = asyncio.Event()

    @property
    def num_connections(self) -> int:
        """The number of clients that are connected."""
        return len(self._connections)

    @property
    def num_kept(self) -> int:
        """The number of streams with a key, running or remembered."""
        return len(self.home.memory)

    async def serve(
        self, link: ServerChannel, identity: Identity = LOCAL_USER, trace: Mapping[str, str] | None = None
    ) -> None:
        """Serve one client until it leaves, or the server ends. `trace` holds the headers that name the trace of its
        requests, if the carrier brought any."""
        connection = ServerConnection(self.home, link, identity, self._echo, trace)
        self._connections.add(connection)
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)
            if not self._connections:
                self._ended.set()

    def drain(self, seconds: float) -> None:
        """Refuse new streams; open streams have `seconds` to finish."""
        for connection in self._connections:
            connection.drain(seconds)

    async def close(self) -> None:
        """End every stream with an error, tell the clients, and free everything kept for them."""
        self._ended.clear()
        for connection in list(self._connections):
            connection.end(EngineClosed("the server was shut down"))
        self.home.memory.clear()
        try:
            async with asyncio.timeout(_END_SECONDS):
                if self._connections:
                    await self._ended.wait()
                await asyncio.gather(*self.home.tasks, return_exceptions=True)
        except TimeoutError:  # clients that do not read; their carriers cut them
            for task in list(self.home.tasks):
                task.cancel()
