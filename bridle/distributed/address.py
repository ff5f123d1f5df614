"""Address of a shard: a unix socket or a TCP port, with TLS on networks. A shard on this machine has an address like
`unix:/path/to/socket`; a shard on another machine has `HOST:PORT`. Without TLS only loopback addresses are allowed,
because every process that can connect to a shard can use it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import grpc

from bridle.errors import InvalidRequest

#: Maximum size of a message in either direction: a step of 256 rows with masks over a vocabulary of a million tokens.
MAX_MESSAGE_BYTES = 64 << 20

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, even if earlier channels failed
    ("grpc.so_reuseport", 0),  # a second shard on the same port is an error
)


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS files in PEM format. A server needs `certificate` and `key`; if it has `authority`, its clients need
    certificates. A client needs `authority`, and also `certificate` and `key` if the server requires certificates."""

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    def server(self) -> grpc.ServerCredentials:
        if self.certificate is None or self.key is None:
            raise InvalidRequest("TLS needs both a certificate and its private key", "tls_cert")
        pair = self.key.read_bytes(), self.certificate.read_bytes()
        authority = None if self.authority is None else self.authority.read_bytes()
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)

    def client(self) -> grpc.ChannelCredentials:
        files = (self.authority, self.key, self.certificate)
        return grpc.ssl_channel_credentials(*(None if path is None else path.read_bytes() for path in files))


def check_address(address: str) -> None:
    """Raise `InvalidRequest` unless the address is `unix:PATH` or `HOST:PORT`."""
    if address.startswith("unix:"):
        if len(address) > len("unix:"):
            return
    else:
        host, colon, port = address.rpartition(":")
        if host and colon and port.isdecimal() and int(port) <= 65535:
            return
    raise InvalidRequest(f"the address is {address!r}; must be unix:/path/to/socket or host:port", "address")


def open_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """Return a channel to a shard. The channel connects when it is first used."""
    check_address(address)
    if tls is None:
        return grpc.insecure_channel(address, _OPTIONS)
    return grpc.secure_channel(address, tls.client(), _OPTIONS)


def listen(server: grpc.Server, address: str, tls: Tls | None = None) -> str:
    """Bind a server to `address`. Returns the address with the actual port. Raises `InvalidRequest` if binding
    fails."""
    check_address(address)
    if tls is None and not address.startswith("unix:") and not _is_loopback(address):
        raise InvalidRequest(
            f"other machines can reach the address {address}: give it a TLS certificate, or listen on 127.0.0.1", "tls"
        )
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.server())
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequest(f"cannot listen on {address}: {error}", "address") from None
    if address.startswith("unix:"):
        Path(address.removeprefix("unix:")).chmod(0o600)
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def make_server_options() -> list[tuple[str, int]]:
    """Return gRPC server options for message sizes, and for keepalive, which detects peers that disappeared."""
    return [*_OPTIONS, ("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000)]


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
