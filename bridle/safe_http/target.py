"""Parses and validates the URL of a request to another server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from bridle.safe_http.addresses import OutboundFailed
from bridle.safe_repr import short_repr

_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,252}[a-z0-9])?")
_PLAIN = re.compile(r"[!-~]{1,8192}")


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """The validated parts of a URL."""

    scheme: str
    host: str
    port: int
    path: str  # includes the query

    @classmethod
    def of(cls, url: Any) -> Self:
        """Parse and validate an untrusted URL. Raises `OutboundFailed`."""
        if not isinstance(url, str) or not _PLAIN.fullmatch(url) or "\\" in url:
            raise OutboundFailed(f"url is {short_repr(url)}; must be a URL of printable ASCII characters")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise OutboundFailed(f"url is {short_repr(url)}: {error}") from None
        host = parts.hostname or ""
        if parts.scheme not in _PORTS or "@" in parts.netloc or parts.fragment:
            raise OutboundFailed(f"url is {short_repr(url)}; must be http or https, without user info and fragment")
        if not _HOST.fullmatch(host):
            raise OutboundFailed(f"url is {short_repr(url)}; its host must be a name or an IPv4 address")
        path = parts.path or "/"
        if is_winding(path):
            raise OutboundFailed(
                f"url is {short_repr(url)}; its path must not have the parts '.' and '..', nor encoded slashes"
            )
        return cls(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path + _query(parts.query))


def _query(text: str) -> str:
    return f"?{text}" if text else ""


def is_winding(path: str) -> bool:
    """Return whether a server might interpret a path as another path, for example because of `..`."""
    plain = unquote(path)
    is_hidden = plain.count("/") != path.count("/") or "\\" in plain or "%" in plain or not plain.isprintable()
    return is_hidden or any(part.partition(";")[0] in (".", "..") for part in plain.split("/"))
