"""A local server of images, whose behaviour depends on the path of a request."""

from __future__ import annotations

import io
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from PIL import Image

from tests.waiting import PATIENCE


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (200, 10, 10)).save(file, "PNG")
    return file.getvalue()


class Files(BaseHTTPRequestHandler):
    """Answers requests for images: `/to/x_y` redirects to `x/y`, `/hangs` begins an answer and never ends it."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        if self.path == "/hangs":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self.asked.append(self.path)
        match self.path.split("/")[1]:
            case "it.png":
                self._answer(200, png(), {"Content-Type": "text/html"})
            case "notes.txt":
                self._answer(200, b"Hey", {"Content-Type": "image/png"})
            case "to":
                self._answer(302, b"", {"Location": self.path.removeprefix("/to/").replace("_", "/")})
            case "round":
                self._answer(301, b"", {"Location": "/round"})
            case "huge":
                self._answer(200, b"x" * 4096)
            case "hangs":
                assert isinstance(self.server, _Server)
                self.server.gate.wait(PATIENCE)
            case _:
                self._answer(404, b"a page that says much")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log no requests."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, address: object) -> None:
        """Print no errors, since clients that reject a certificate close the connection."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Files)
        self.gate = threading.Event()


@contextmanager
def served_pictures(certificate: Path | None = None, key: Path | None = None) -> Iterator[str]:
    """Yield the address and port of a server of images; with a certificate the server uses https."""
    server = _Server()
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        # Each connection shakes hands by itself: a client that gives up there must not end the server.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.gate.set()
        server.shutdown()
        server.server_close()
