"""The host names to which a server without keys answers.

A browser lets a page talk to the host that the page came from. The owner of a name can make it point to this machine
after a visitor has loaded a page from there. To the browser that page and this server are then one site, and no rule
about origins keeps them apart. But every request contains the name. So a server without keys answers only to addresses,
which cannot be made to point elsewhere, to `localhost`, and to names that the operator allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from bridle.errors import InvalidRequest, Unauthorized

_MAX_SHOWN_CHARS = 80


class UnknownHost(Unauthorized):
    """A request to a host name that is not allowed. No key would help."""


class AllowedHosts:
    """The allowed host names. In `names`, a name that begins with a dot means all names below it, and `*` any."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(_plain(name) for name in names)
        for name in self._names:
            if not name or "/" in name or (":" in name and not _is_address(name)):
                raise InvalidRequest(f"allowed_host is {name[:80]!r}; must be a name without a port", "allowed_host")

    def check(self, host: str | None) -> None:
        """Raise `UnknownHost` unless `host`, a header with or without a port, is allowed. Clients that send no such
        header are no browsers, and are let in."""
        name = _plain(_without_port(host or ""))
        if not name or self._knows(name):
            return
        raise UnknownHost(
            f"requests to the name {name[:_MAX_SHOWN_CHARS]!r} are not answered, since a page from elsewhere could be "
            f"behind it; use the address, or serve with --allowed-host NAME or with --keys"
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
