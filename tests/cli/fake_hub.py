"""A fake hub on loopback, with one repository to download and one gated repository."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "beef"
#: Repositories and their files. `org/gated` shows what it has to everybody, and gives it to nobody.
FILES: Mapping[str, Mapping[str, bytes]] = {
    "org/small-model": {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"},
    "org/gated": {"config.json": b"{}"},
}


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        is_api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if name == "org/broken":
            self._send(503, b"{}", {}, has_body)
        elif name not in FILES:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}, has_body)
        elif rest[:1] == ["auth-check"] or (name == "org/gated" and not is_api):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, has_body)
        elif is_api:
            self._send(200, json.dumps(self._about(name, rest)).encode(), {}, has_body)
        else:
            body = FILES[name][rest[-1]]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
            self._send(200, body, headers, has_body)

    def _about(self, name: str, rest: list[str]) -> object:
        if rest[:1] == ["tree"]:
            return [{"type": "file", "path": path, "size": len(body), "oid": "0"} for path, body in FILES[name].items()]
        siblings = [{"rfilename": path} for path in FILES[name]]
        return {"id": name, "sha": COMMIT, "gated": "manual" if name == "org/gated" else False, "siblings": siblings}

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], has_body: bool) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def fake_hub() -> Iterator[str]:
    """Yield the address of a hub that runs within the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
