"""Clients of LMTP servers, and the ways to reach one."""

from bridle.lmtp.client.client import Client
from bridle.lmtp.client.retry import RetryPolicy
from bridle.lmtp.client.stream import TokenStream
from bridle.lmtp.client.sync import SyncClient, SyncStream
from bridle.lmtp.client.transports import (
    ClientChannel,
    MemoryCarrier,
    SocketCarrier,
    StdioCarrier,
    Transport,
    memory_pair,
)
from bridle.lmtp.client.websocket import WebSocketCarrier

__all__ = [
    "Transport",
    "Client",
    "ClientChannel",
    "MemoryCarrier",
    "RetryPolicy",
    "SocketCarrier",
    "StdioCarrier",
    "SyncClient",
    "SyncStream",
    "TokenStream",
    "WebSocketCarrier",
    "memory_pair",
]
