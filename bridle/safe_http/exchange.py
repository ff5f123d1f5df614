"""One HTTP request and its response, over a connection to a checked address, with limits on size and time.

Redirects are returned, not followed. A connection serves one request.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from bridle.safe_http.addresses import Networks, OutboundFailed, checked_address
from bridle.safe_http.target import HttpTarget
from bridle.safe_repr import short_repr

_PIECE = 65_536
_MAX_SHOWN = 300


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of requests. `max_bytes` is the maximum size of a response. `timeout` limits a request and its response
    together, in seconds. `private` lists networks with private addresses to which connections are allowed. `headers`
    are sent with every request."""

    max_bytes: int = 256 << 10
    timeout: float = 10.0
    private: Networks = ()
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """The response of a server. The names in `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class HttpExchange:
    """A request and its response. `run` sends the request in the calling thread; `abort` ends the request from another
    thread."""

    def __init__(
        self, bounds: HttpLimits, target: HttpTarget, method: str = "GET", body: bytes | None = None, kind: str = ""
    ) -> None:
        """Create a request, and start its timeout. `kind` is the content type of `body`."""
        self._bounds, self._target = bounds, target
        self._method, self._body, self._kind = method, body, kind
        self._deadline = time.monotonic() + bounds.timeout
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_over = False

    def run(self) -> HttpResponse:
        """Connect, send the request, and read the response. Raises `OutboundFailed`."""
        target = self._target
        address = checked_address(target.host, target.port, self._bounds.private)
        connection = http.client.HTTPConnection(target.host, target.port)
        try:
            connection.sock = self._connect(address)
            headers = {"Accept-Encoding": "identity", "User-Agent": "bridle", **self._bounds.headers}
            if self._body is not None:
                headers["Content-Type"] = self._kind
            connection.request(self._method, target.path, self._body, headers)
            self._keep_time()
            answer = self._read(connection.getresponse())
            if self._is_over:  # after `abort`, headers or a body seem to end
                raise TimeoutError
            return answer
        except ssl.SSLCertVerificationError as error:
            raise OutboundFailed(
                f"{target.host} has an untrusted certificate: {error.verify_message} (set SSL_CERT_FILE)"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            if self._is_over or isinstance(error, TimeoutError):
                raise OutboundFailed(f"got no answer within {self._bounds.timeout:g} seconds (timeout)") from None
            raise OutboundFailed(
                f"the request to {target.host} failed: {type(error).__name__}: {str(error)[:_MAX_SHOWN]}"
            ) from None
        finally:
            connection.close()

    def _connect(self, address: str) -> socket.socket:
        target = self._target
        self._hold(None)
        sock: socket.socket = socket.create_connection((address, target.port), self._remaining)
        try:
            if target.scheme == "https":
                context = ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=target.host, do_handshake_on_connect=False)
            self._hold(sock)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
        except BaseException:
            sock.close()
            raise
        return sock

    def _hold(self, sock: socket.socket | None) -> None:
        """Record the connection that `abort` must close. Raises `OutboundFailed` if `abort` was called before."""
        with self._lock:
            if self._is_over:
                raise OutboundFailed("the HTTP request was cancelled")
            self._socket = sock

    def _read(self, response: http.client.HTTPResponse) -> HttpResponse:
        limit = self._bounds.max_bytes
        pieces: list[bytes] = []
        while sum(map(len, pieces)) <= limit:
            self._keep_time()
            piece = response.read1(_PIECE)
            if not piece:
                if response.length:
                    raise http.client.IncompleteRead(b"".join(pieces), response.length)
                break
            pieces.append(piece)
        data = b"".join(pieces)
        if len(data) > limit:
            raise OutboundFailed(f"the answer has more than {limit} bytes (max_bytes)")
        headers = {name.lower(): value for name, value in response.getheaders()}
        if headers.get("content-encoding", "identity") != "identity":
            raise OutboundFailed(f"the answer has the content encoding {short_repr(headers['content-encoding'])}")
        return HttpResponse(response.status, headers, data)

    @property
    def _remaining(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _keep_time(self) -> None:
        if self._socket is not None:
            self._socket.settimeout(self._remaining)

    def abort(self) -> None:
        """Close the connection, so that the thread in `run` returns. Idempotent."""
        with self._lock:
            self._is_over, sock = True, self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
