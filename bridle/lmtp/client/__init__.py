"""Clients of LMTP servers, and the transports by which they connect."""

from bridle.lmtp.client.client import Client as Client
from bridle.lmtp.client.retry import RetryPolicy as RetryPolicy
from bridle.lmtp.client.stream import TokenStream as TokenStream
from bridle.lmtp.client.sync import SyncClient as SyncClient
from bridle.lmtp.client.sync import SyncStream as SyncStream
from bridle.lmtp.client.transports import ClientChannel as ClientChannel
from bridle.lmtp.client.transports import MemoryCarrier as MemoryCarrier
from bridle.lmtp.client.transports import SocketCarrier as SocketCarrier
from bridle.lmtp.client.transports import StdioCarrier as StdioCarrier
from bridle.lmtp.client.transports import Transport as Transport
from bridle.lmtp.client.transports import memory_pair as memory_pair
from bridle.lmtp.client.websocket import WebSocketCarrier as WebSocketCarrier
