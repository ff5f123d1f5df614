"""A proxy between a client and a server that records their messages, as evidence of a run.

The proxy passes bytes on as soon as they arrive, so a stream remains a stream. The proxy changes only the host name in
requests.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: Seconds between two checks whether a client is still connected.
_LOOK_SECONDS = 0.5
_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
#: Parts of the last events of streams.
_LAST_EVENTS = (b'"type":"response.completed"', b'"type":"message_stop"', b"data: [DONE]")
#: Marks of tool results in the request bodies of the APIs.
_RESULTS = (b'"tool_result"', b'"role":"tool"', b'"role": "tool"', b'"function_call_output"')


@dataclass(slots=True)
class Exchange:
    """One request and its answer. `is_whole` means that the answer was complete before the client disconnected."""

    method: str
    path: str
    request: bytes
    status: int = 0
    answer: bytes = b""
    is_whole: bool = False

    @property
    def has_results(self) -> bool:
        """Return whether the request carries the result of a tool."""
        return any(mark in self.request for mark in _RESULTS)

    @property
    def is_stream(self) -> bool:
        return b"data:" in self.answer[:2000]


@contextmanager
def recording(port: int, folder: Path | None = None) -> Iterator[tuple[int, list[Exchange]]]:
    """Run a proxy for the server at `port` of this machine; yield the proxy's port, and the recorded messages. `folder`
    gets a file for each exchange."""
    exchanges: list[Exchange] = []

    class Handler(_Handler):
        upstream, seen, notes = port, exchanges, folder

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], exchanges
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _leave_with(client: socket.socket, upstream: socket.socket) -> None:
    """End the connection to the server when the client disconnects, also while no data is sent to the client."""
    with suppress(OSError, ValueError):  # one of the sockets is closed, so the answer has ended
        while upstream.fileno() >= 0:
            if select.select([client], [], [], _LOOK_SECONDS)[0] and not client.recv(1, socket.MSG_PEEK):
                upstream.shutdown(socket.SHUT_RDWR)
                return


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: int
    seen: list[Exchange]
    notes: Path | None

    def _pass(self) -> None:
        body = self._body()
        exchange = Exchange(self.command, self.path, body)
        self.seen.append(exchange)
        try:
            self._answer(exchange)
            exchange.is_whole = True
        except (OSError, http.client.HTTPException):  # some clients leave after the last event, before the stream's end
            self.close_connection = True
            exchange.is_whole = any(mark in exchange.answer for mark in _LAST_EVENTS)
        finally:
            self._note(exchange)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", "0")))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, exchange: Exchange) -> None:
        link = http.client.HTTPConnection("127.0.0.1", self.upstream)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        link.connect()
        try:
            threading.Thread(target=_leave_with, args=(self.connection, link.sock), daemon=True).start()
            link.request(exchange.method, exchange.path, exchange.request or None, headers)
            answer = link.getresponse()
            exchange.status = answer.status
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            while piece := answer.read1(1 << 16):
                exchange.answer += piece
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        finally:
            link.close()

    def _note(self, exchange: Exchange) -> None:
        if self.notes is None:
            return
        self.notes.mkdir(parents=True, exist_ok=True)
        name = f"{self.seen.index(exchange):03}-{exchange.path.strip('/').partition('?')[0].replace('/', '-')}"
        head = {"method": exchange.method, "path": exchange.path, "status": exchange.status}
        text = json.dumps(head | {"is_whole": exchange.is_whole}) + "\n"
        parts = [text.encode(), exchange.request, b"\n\n", exchange.answer]
        (self.notes / f"{name}.txt").write_bytes(b"".join(parts))

    do_GET = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815  (the base class's names)

    def log_message(self, *args: Any) -> None:
        """Log nothing, because the recorded exchanges contain all requests."""
