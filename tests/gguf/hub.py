"""A fake Hugging Face hub whose repositories are folders, with the routes that `huggingface_hub` needs for a
snapshot."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a hub with the repositories `root/owner/name`, and the list of files that clients downloaded."""
    sent: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, has_body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                files = sorted(path.name for path in (root / parts[2] / parts[3]).glob("*"))
                if "tree" in parts:
                    listed = [_entry(root / parts[2] / parts[3] / name) for name in files]
                    self._send(json.dumps(listed).encode(), {"Content-Type": "application/json"}, has_body)
                    return
                names = [{"rfilename": name} for name in files]
                info = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": names, "private": False}
                self._send(json.dumps(info).encode(), {"Content-Type": "application/json"}, has_body)
                return
            path = root / parts[0] / parts[1] / parts[-1]
            if "resolve" not in parts or not path.is_file():
                self.send_error(404)
                return
            if has_body:
                sent.append(path.name)
            data = path.read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(data, headers, has_body)

        def _send(self, data: bytes, headers: dict[str, str], has_body: bool) -> None:
            self.send_response(200)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Log no requests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _entry(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    return {"type": "file", "path": path.name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
