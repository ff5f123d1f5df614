"""The LMTP server. The streams of many clients run together in each model's continuous batch."""

from bridle.lmtp.server.connection import ServerChannel as ServerChannel
from bridle.lmtp.server.line_transport import LineChannel as LineChannel
from bridle.lmtp.server.line_transport import serve_unix as serve_unix
from bridle.lmtp.server.line_transport import socket_link as socket_link
from bridle.lmtp.server.line_transport import stdio_link as stdio_link
from bridle.lmtp.server.server import LmtpServer as LmtpServer
from bridle.lmtp.server.server import LocalHost as LocalHost
from bridle.lmtp.server.settings import LmtpSettings as LmtpSettings
from bridle.lmtp.server.websocket import LmtpEndpoint as LmtpEndpoint
from bridle.lmtp.server.websocket import websocket_front as websocket_front
