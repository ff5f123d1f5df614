"""Opens the socket on which a server listens. The command line binds the address before it loads models, to report
errors early."""

from __future__ import annotations

import socket

from bridle.errors import InvalidRequest


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to the address, but does not listen yet. Raises `InvalidRequest` with the next
    step."""
    check_port(port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidRequest(f"cannot listen on host {host!r}: {error}", "host") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise InvalidRequest(f"cannot listen on {host}:{port}: {reason}; choose another port", "port") from None
    return listener


def check_port(port: int) -> None:
    """Raise `InvalidRequest` for an invalid port number."""
    if not 0 <= port <= 65535:
        raise InvalidRequest(f"port is {port}; must be between 0 and 65535", "port")


def try_address(host: str, port: int) -> None:
    """Raise `InvalidRequest` unless a server can listen on the address now."""
    bind(host, port).close()
