"""Checks addresses before a connection: public addresses are allowed, and private addresses only if the operator has
listed them.

A host name is resolved once. All addresses of the name must be allowed, and the connection goes to one of the checked
addresses. So a host name that resolves differently after the check cannot redirect the connection.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from bridle.errors import InvalidRequest


class OutboundFailed(Exception):
    """Raised if a request to another server failed. The message is one sentence that a client may read. The caller
    converts the exception to one of bridle's errors."""


Address = IPv4Address | IPv6Address
Networks = tuple[IPv4Network | IPv6Network, ...]

#: IPv6 networks whose addresses contain an IPv4 address, and the position of its bits: NAT64 and 6to4.
_EMBEDDED = ((IPv6Network("64:ff9b::/96"), 0), (IPv6Network("2002::/16"), 80))
_TEREDO = IPv6Network("2001::/32")


def networks_of(texts: Iterable[str]) -> Networks:
    """Parse an operator's list of addresses and networks. Raises `InvalidRequest`."""
    try:
        return tuple(ip_network(text) for text in texts)
    except ValueError as error:
        raise InvalidRequest(f"private: {error}", "private") from None


def is_allowed(address: Address, private: Networks) -> bool:
    """Return whether connections to an address are allowed: it is public, or in one of the networks `private`."""
    if any(address.version == network.version and address in network for network in private):
        return True
    inner = _embedded(address)
    if inner is not None:
        return is_allowed(inner, private)
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _embedded(address: Address) -> IPv4Address | None:
    """Return the IPv4 address that an IPv6 address contains; None if it contains no IPv4 address."""
    if isinstance(address, IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    for network, shift in _EMBEDDED:
        if address in network:
            return IPv4Address(int(address) >> shift & 0xFFFFFFFF)
    if address in _TEREDO:
        return IPv4Address(~int(address) & 0xFFFFFFFF)
    return None


def checked_address(host: str, port: int, private: Networks) -> str:
    """Resolve a host name and return the address to connect to. Raises `OutboundFailed` if the host has no address, or
    any address that is not allowed. Blocks."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OutboundFailed(f"host {host!r} cannot be resolved: {error.strerror or error}") from None
    addresses = [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    for address in addresses:
        if not is_allowed(address, private):
            raise OutboundFailed(
                f"host {host!r} has the address {address}, which is not public and not listed as private"
            )
    if not addresses:
        raise OutboundFailed(f"host {host!r} has no address")
    return str(addresses[0])
