"""Checks the host name in requests to a server without keys.

A browser lets a page send requests to the host that the page came from. An attacker with a host name can make it point
to this machine after a visitor has loaded the page (DNS rebinding). The browser then treats the attacker's page and
this server as the same origin, so rules about origins do not protect the server. But every request contains the host
name. So a server without keys answers only for IP addresses, which an attacker cannot redirect, for `localhost`, and
for names that the operator allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from bridle.errors import InvalidRequest, Unauthorized

_MAX_SHOWN_CHARS = 80


class UnknownHost(Unauthorized):
    """Raised for a request with a host name that is not allowed. An API key would not change the refusal."""


class AllowedHosts:
    """The allowed host names. In `names`, a name that begins with a dot allows all names below it, and `*` allows any
    name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(_plain(name) for name in names)
        for name in self._names:
            if not name or "/" in name or (":" in name and not _is_address(name)):
                raise InvalidRequest(
                    f"allowed_host is {name[:80]!r}; must be a host name without a port", "allowed_host"
                )

    def check(self, host: str | None) -> None:
        """Raise `UnknownHost` unless the header `Host`, with or without a port, is allowed. Clients that do not send
        this header are allowed, because they are not browsers."""
        name = _plain(_without_port(host or ""))
        if not name or self._knows(name):
            return
        raise UnknownHost(
            f"requests to the host name {name[:_MAX_SHOWN_CHARS]!r} are refused, because a foreign web page could "
            "send them; use the IP address, or serve with --allowed-host NAME or with --keys"
        )

    def _knows(self, name: str) -> bool:
        if "*" in self._names or name in self._names or _is_address(name):
            return True
        is_local = name == "localhost" or name.endswith(".localhost")
        return is_local or any(known.startswith(".") and name.endswith(known) for known in self._names)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _plain(name: str) -> str:
    return name.strip().lower().rstrip(".") if name.strip() != "." else ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
