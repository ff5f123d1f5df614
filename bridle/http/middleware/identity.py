"""Identifies the sender of a request by API key, WebSocket ticket or a trusted proxy's headers, or as the single user
of a local server.

With API keys, every route needs a key, except health checks and the pages for browsers. Without keys, the server has a
single user, and every client is an admin, as with AICI's original server; `serve` then listens on loopback only. The
headers `x-user-id`, `x-user-role` and `x-user-group` count only if they come from a configured proxy's address.
"""

from __future__ import annotations

import base64
from ipaddress import ip_address, ip_network

from starlette.requests import HTTPConnection

from bridle.errors import Unauthorized
from bridle.http.errors import RefusedBody
from bridle.http.middleware.trusted_hosts import AllowedHosts
from bridle.serving.tenancy.keys import LOCAL_USER, Identity, KeyStore
from bridle.serving.tenancy.socket_tickets import TICKET_SECONDS, SocketTickets

_OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/ping")
#: Pages for browsers, which send no key when they open a page. The pages name no served model.
_PAGES = ("/", "/docs", "/openapi.json")
_PARTS = "/playground/"
_MAX_USER_CHARS = 100
_KEY_IN_ADDRESS = (
    "the address has ?key=, but proxies log addresses: replace that API key, and send the new one as 'Authorization: "
    "Bearer KEY' or write http://any:KEY@HOST. A client that can send no headers gets a ticket with POST "
    "/v1/websocket_tickets and connects to ?ticket=TICKET"
)


class Identifier:
    """Identifies the sender of a request from its headers."""

    def __init__(
        self,
        keys: KeyStore | None,
        trusted_proxies: tuple[str, ...] = (),
        allowed_hosts: AllowedHosts | None = None,
        tickets: SocketTickets | None = None,
    ) -> None:
        """Without keys, requests to `allowed_hosts` (None: to any host) count as requests of the single user. With
        keys, a ticket from `tickets` also opens a WebSocket."""
        self._hosts = allowed_hosts
        self._tickets = SocketTickets() if tickets is None else tickets
        self._keys = keys
        self._proxies = tuple(ip_network(proxy) for proxy in trusted_proxies)

    def __call__(self, connection: HTTPConnection) -> Identity | None:
        """Return the sender of a request; None on routes that need no sender. Raises `Unauthorized`."""
        if connection.scope["path"] in _OPEN_PATHS:
            return None
        if connection.scope["type"] == "websocket" and "key" in connection.query_params:
            raise Unauthorized(_KEY_IN_ADDRESS)
        if self._proxies and self._is_proxy(connection) and (user := connection.headers.get("x-user-id")):
            group = connection.headers.get("x-user-group", "")
            for header, name in (("x-user-id", user), ("x-user-group", group)):
                if len(name) > _MAX_USER_CHARS:  # two names could be equal if they were cut off
                    raise Unauthorized(f"the header {header} has {len(name)} characters; at most {_MAX_USER_CHARS}")
            return Identity(user, connection.headers.get("x-user-role") == "admin", group=group)
        if self._keys is None:
            if self._hosts is not None:
                for host in connection.headers.getlist("host"):
                    self._hosts.check(host)
            return LOCAL_USER
        if connection.scope["type"] == "websocket" and (ticket := connection.query_params.get("ticket")):
            return self._redeem(ticket)
        key = _key_of(connection)
        if key is None and _is_page(connection):
            return None
        if key is None:
            raise Unauthorized("an API key is needed; send it as 'Authorization: Bearer KEY' or 'api-key: KEY'")
        identity = self._keys.find(key)
        if identity is None:
            raise Unauthorized("this server does not know the API key")
        return identity

    def _redeem(self, ticket: str) -> Identity:
        identity = self._tickets.redeem(ticket)
        if identity is None:
            raise Unauthorized(
                f"the WebSocket ticket is unknown, was used, or is older than {TICKET_SECONDS:g} s; POST "
                "/v1/websocket_tickets returns a new ticket for each connection"
            )
        return identity

    def _is_proxy(self, connection: HTTPConnection) -> bool:
        if connection.client is None:
            return False
        try:
            address = ip_address(connection.client.host)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)


def identity_of(connection: HTTPConnection) -> Identity:
    """Return the user that sent this request."""
    identity = connection.scope.get("state", {}).get("identity")
    return identity if isinstance(identity, Identity) else LOCAL_USER


def check_admin(connection: HTTPConnection) -> None:
    """Raise an error with status 403 unless an admin sent the request."""
    identity = identity_of(connection)
    if not identity.is_admin:
        raise RefusedBody(403, Unauthorized(f"user {identity.user!r} may not do this: an admin's key is required"))


def _is_page(connection: HTTPConnection) -> bool:
    scope = connection.scope
    is_page = scope["path"] in _PAGES or scope["path"].startswith(_PARTS)
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and is_page


def _key_of(connection: HTTPConnection) -> str | None:
    """Return the API key from the places that clients of the supported APIs use: three headers, and the password of a
    URL `USER:KEY@HOST`."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if scheme.lower() == "basic" and (password := _password(token)):
        return password
    return connection.headers.get("api-key") or connection.headers.get("x-api-key")


def _password(token: str) -> str:
    """Return the password of a Basic credential; empty if the credential is malformed."""
    try:
        return base64.b64decode(token.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""
