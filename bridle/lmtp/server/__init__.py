"""The server's side of LMTP: streams of many clients in the one continuous batch of each model."""

from bridle.lmtp.server.connection import Link
from bridle.lmtp.server.server import LmtpServer, LocalHost
from bridle.lmtp.server.settings import LmtpSettings
from bridle.lmtp.server.websocket import LmtpEndpoint, websocket_front

__all__ = ["Link", "LmtpEndpoint", "LmtpServer", "LmtpSettings", "LocalHost", "websocket_front"]
