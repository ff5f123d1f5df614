"""The server's side of LMTP: the streams of many clients run in the one continuous batch of each model."""

from bridle.lmtp.server.connection import ServerChannel
from bridle.lmtp.server.line_transport import LineChannel, serve_unix, socket_link, stdio_link
from bridle.lmtp.server.server import LmtpServer, LocalHost
from bridle.lmtp.server.settings import LmtpSettings
from bridle.lmtp.server.websocket import LmtpEndpoint, websocket_front

__all__ = [
    "LineChannel",
    "ServerChannel",
    "LmtpEndpoint",
    "LmtpServer",
    "LmtpSettings",
    "LocalHost",
    "serve_unix",
    "socket_link",
    "stdio_link",
    "websocket_front",
]
