"""The LMTP server: serves clients over any transport with the models of one registry."""

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


#: The host of a server that runs without HTTP.
LocalHost = AppState


class LmtpServer:
    """Serves any number of connections. `host` provides the models and the admission control, and says whether new
    requests are accepted. `echo` is called with each message of a client.

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
        """Return the number of connected clients."""
        return len(self._connections)

    @property
    def num_kept(self) -> int:
        """Return the number of stored streams with a key."""
        return len(self.home.memory)

    async def serve(
        self, link: ServerChannel, identity: Identity = LOCAL_USER, trace: Mapping[str, str] | None = None
    ) -> None:
        """Serve one client until it disconnects or the server ends. If the transport has headers, `trace` has those
        that name the distributed trace of the client's requests."""
        connection = ServerConnection(self.home, link, identity, self._echo, trace)
        self._connections.add(connection)
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)
            if not self._connections:
                self._ended.set()

    def drain(self, seconds: float) -> None:
        """Refuse new streams. Open streams have `seconds` to finish."""
        for connection in self._connections:
            connection.drain(seconds)

    async def close(self) -> None:
        """End every stream with an error, report the shutdown to the clients, and release all resources."""
        self._ended.clear()
        for connection in list(self._connections):
            connection.end(EngineClosed("the server was shut down"))
        self.home.memory.clear()
        try:
            async with asyncio.timeout(_END_SECONDS):
                if self._connections:
                    await self._ended.wait()
                await asyncio.gather(*self.home.tasks, return_exceptions=True)
        except TimeoutError:  # some clients do not read; their transports close the connections
            for task in list(self.home.tasks):
                task.cancel()
