"""Clients of LMTP servers, and the ways to reach one."""

from bridle.lmtp.client.carriers import Carrier, MemoryCarrier, MessageChannel, SocketCarrier, StdioCarrier, memory_pair
from bridle.lmtp.client.client import Client
from bridle.lmtp.client.patience import Patience
from bridle.lmtp.client.stream import TokenStream
from bridle.lmtp.client.sync import SyncClient, SyncStream
from bridle.lmtp.client.websocket import WebSocketCarrier

__all__ = [
    "Carrier",
    "Client",
    "MessageChannel",
    "MemoryCarrier",
    "Patience",
    "SocketCarrier",
    "StdioCarrier",
    "SyncClient",
    "SyncStream",
    "TokenStream",
    "WebSocketCarrier",
    "memory_pair",
]
