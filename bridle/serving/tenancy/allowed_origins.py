"""Checks which web pages may open a WebSocket, by their origin. Without this check, a browser would let any page
connect with the rights of the browser's user."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit


def may_connect(headers: Iterable[tuple[bytes, bytes]], allowed: Iterable[str]) -> bool:
    """Return whether an upgrade request is allowed. The request must come from a page of this server, from an origin in
    `allowed`, or from a client that is no browser."""
    found = {name.lower(): value.decode("latin-1") for name, value in headers}
    origin = found.get(b"origin")
    return origin is None or bool({"*", origin} & {*allowed}) or urlsplit(origin).netloc == found.get(b"host")
