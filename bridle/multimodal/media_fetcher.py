"""Fetches images and other media files from other servers, but only from hosts that the operator lists.

The type and size that a server states are not trusted. The host of a redirect's target must be listed, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Self
from urllib.parse import urljoin

from bridle.errors import InvalidRequest, MediaRefused, UnsupportedFeature
from bridle.multimodal.modalities import IMAGE, word
from bridle.safe_http import HttpExchange, HttpLimits, HttpResponse, HttpTarget, Networks, OutboundFailed, networks_of
from bridle.safe_repr import short_repr

_SCHEMES = ("http://", "https://")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 3


def is_remote(url: object) -> bool:
    """Return whether a URL refers to a file on another server."""
    return isinstance(url, str) and url[:8].lower().startswith(_SCHEMES)


@dataclass(frozen=True, slots=True)
class ListedHost:
    """A listed host (scheme, name and port). The host's addresses may be private if they are in the networks listed in
    `private`."""

    scheme: str
    host: str
    port: int
    private: Networks = ()

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse `HOST`, `HOST:PORT` or `http://HOST`; `=NETWORK` follows if the host's addresses are private. A host
        that is listed as an IP address may be private without `=NETWORK`. Raises `InvalidRequest`."""
        place, _, network = text.partition("=")
        try:
            target = HttpTarget.of(place if place.startswith(_SCHEMES) else f"https://{place}")
            private = networks_of([network]) if network else _itself(target.host)
        except (OutboundFailed, InvalidRequest) as error:
            raise InvalidRequest(f"image_hosts has the entry {short_repr(text)}: {error}", "image_hosts") from None
        if target.path != "/":
            raise InvalidRequest(f"image_hosts has {short_repr(text)}; it must be a host without a path", "image_hosts")
        return cls(target.scheme, target.host, target.port, private)

    def serves(self, target: HttpTarget) -> bool:
        """Return whether a URL belongs to this host."""
        return (target.scheme, target.host, target.port) == (self.scheme, self.host, self.port)


def _itself(host: str) -> Networks:
    try:
        return (ip_network(host),)
    except ValueError:
        return ()  # a host name, not an address


class ImageHosts:
    """The hosts from which bridle may fetch media files."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Parse the hosts that the operator lists (see `ListedHost.of`). Raises `InvalidRequest`."""
        self._hosts = tuple(map(ListedHost.of, [texts] if isinstance(texts, str) else texts))

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def fetch(self, url: str, max_bytes: int, deadline: float, where: str, modality: str = IMAGE) -> bytes:
        """Return the bytes of the media file at a URL. Waits at most until `deadline` on the monotonic clock. Raises
        `UnsupportedFeature` for a host that is not listed, and `MediaRefused` if the fetch fails."""
        for _ in range(_MOST_REDIRECTS + 1):
            try:
                target = HttpTarget.of(url)
                private = self._listed(target, where, modality).private
                answer = _fetched(target, HttpLimits(max_bytes, _left(deadline), private, {"Accept": f"{modality}/*"}))
            except OutboundFailed as error:
                raise MediaRefused(f"{where} cannot be fetched: {error}", where) from None
            if answer.status == 200:
                return answer.data
            place = answer.headers.get("location")
            if answer.status not in _REDIRECTS or place is None:
                raise MediaRefused(
                    f"{where} cannot be fetched: {target.host} answered with status {answer.status}", where
                )
            url = urljoin(url, place)
        raise MediaRefused(f"{where} cannot be fetched: redirected more than {_MOST_REDIRECTS} times", where)

    def _listed(self, target: HttpTarget, where: str, modality: str) -> ListedHost:
        for host in self._hosts:
            if host.serves(target):
                return host
        origin = f"{target.scheme}://{target.host}:{target.port}"
        raise UnsupportedFeature(
            f"{where} ({word(modality)}) is at {origin}; this server may not fetch from that host (--allow-image-host)",
            where,
        )


def _fetched(target: HttpTarget, bounds: HttpLimits) -> HttpResponse:
    """Fetch the response within the time limit, even if the server sends slowly. A socket timeout is not enough,
    because it restarts with each byte that arrives."""
    exchange = HttpExchange(bounds, target)
    watch = threading.Timer(bounds.timeout, exchange.abort)
    watch.daemon = True
    watch.start()
    try:
        return exchange.run()
    finally:
        watch.cancel()


def _left(deadline: float) -> float:
    """Return the seconds until the deadline, rounded for messages."""
    return max(round(deadline - time.monotonic(), 1), 0.1)
