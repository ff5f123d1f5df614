"""The network transport: messages as WebSocket text frames, with the library `websockets`."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from bridle.errors import ConnectionLost, InvalidRequest, Unauthorized
from bridle.lmtp.client.transports import ClientChannel
from bridle.lmtp.messages import MAX_MESSAGE_BYTES

DEFAULT_ENDPOINT = "localhost:8080"
_SCHEMES = {"ws": "ws", "http": "ws", "wss": "wss", "https": "wss"}
_REFUSED = (401, 403)


def endpoint_url(endpoint: str) -> str:
    """Convert an endpoint to a WebSocket URL. An endpoint is `HOST:PORT`, or a ws, wss, http or https URL with path,
    query and `user:secret@`.

    Raises `InvalidRequest` for any other text.
    """
    address = endpoint if "://" in endpoint else f"ws://{endpoint}"
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"{endpoint!r} is not an address: {error}", "endpoint") from error
    if parts.scheme.lower() not in _SCHEMES or not parts.hostname:
        raise InvalidRequest(f"{endpoint!r} is not an address; write HOST:PORT or ws://HOST:PORT/PATH", "endpoint")
    scheme = _SCHEMES[parts.scheme.lower()]
    netloc = parts.netloc if port is not None or scheme == "wss" or "://" in endpoint else f"{parts.netloc}:8080"
    return urlunsplit((scheme, netloc, parts.path or "/", parts.query, ""))


class WebSocketCarrier:
    """Transport to a server on the network. Pings, which bridle's server and LMQL's server answer, detect lost
    connections."""

    def __init__(
        self, endpoint: str = DEFAULT_ENDPOINT, *, open_timeout: float = 10.0, ping: float | None = 20.0
    ) -> None:
        self.url = endpoint_url(endpoint)
        self._open_timeout = open_timeout
        self._ping = ping

    @property
    def name(self) -> str:
        """Return the server's URL without user name and secret."""
        return re.sub(r"//[^/@]*@", "//", self.url).partition("?")[0]

    async def connect(self) -> ClientChannel:
        try:
            connection = await connect(
                self.url,
                compression=None,  # messages are short, so compression costs more than it saves
                max_size=MAX_MESSAGE_BYTES,
                open_timeout=self._open_timeout,
                ping_interval=self._ping,
                ping_timeout=self._ping,
                close_timeout=1.0,
                proxy=None,
            )
        except InvalidStatus as error:
            raise self._refusal(error.response.status_code) from error
        except InvalidURI as error:
            raise InvalidRequest(f"{self.name} is not a WebSocket address: {error}", "endpoint") from error
        except (OSError, TimeoutError, InvalidHandshake, EOFError) as error:
            raise ConnectionLost(f"{self.name} cannot be reached: {error or type(error).__name__}") from error
        return _WebSocketLink(connection, self.name)

    def _refusal(self, status: int) -> Exception:
        if status in _REFUSED:
            return Unauthorized(
                f"{self.name} requires an API key (HTTP {status}): write it as http://any:KEY@HOST:PORT"
            )
        return ConnectionLost(f"{self.name} answers with HTTP {status} instead of a WebSocket; is it an LMTP server?")


class _WebSocketLink:
    def __init__(self, connection: ClientConnection, name: str) -> None:
        self._connection = connection
        self._name = name

    async def send(self, message: str) -> None:
        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise ConnectionLost(f"the connection to {self._name} is closed: {error}") from error

    async def receive(self) -> str:
        while True:
            try:
                message = await self._connection.recv()
            except ConnectionClosed as error:
                raise ConnectionLost(f"the connection to {self._name} is closed: {error}") from error
            if isinstance(message, str):  # the protocol has no binary frames
                return message

    async def close(self) -> None:
        await self._connection.close()
