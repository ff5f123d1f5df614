"""Shared variables of a request whose sequences run in different processes: the worker's client and the supervisor's
server.

Each worker process sends requests to the supervisor over its own socket, and waits for each reply. The supervisor
serves all workers, so each variable has one order of versions.
"""

from __future__ import annotations

import socket

from bridle.aici.replies import ReadVar, WriteVar
from bridle.aici.runtime import messages as m
from bridle.aici.runtime.ring import receive_frame, send_frame
from bridle.aici.runtime.storage import SharedVariables
from bridle.aici.runtime.wasm import GuestFault

_requests = m.decoder(m.Variable)
_replies = m.decoder(m.VariableReply)


class RemoteVariables:
    """Implements `storage.Variables` over a socket. Use the object from one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def execute(self, command: ReadVar | WriteVar) -> bytes:
        if isinstance(command, ReadVar):
            return self._ask(m.Variable(command.name)).reply
        return self._ask(m.Variable(command.name, command)).reply

    def version(self, name: str) -> int:
        return self._ask(m.Variable(name, only_version=True)).version

    def close(self) -> None:
        self._socket.close()

    def _ask(self, message: m.Variable) -> m.VariableReply:
        send_frame(self._socket, m.encode(message))
        data, _ = receive_frame(self._socket)
        reply: m.VariableReply = _replies.decode(data)
        if reply.error:
            raise GuestFault(reply.error)
        return reply


def serve(sock: socket.socket, variables: SharedVariables) -> None:
    """Answer one request of a worker. Raises `PeerGone` when the worker has closed its end of the socket."""
    data, _ = receive_frame(sock)
    request: m.Variable = _requests.decode(data)
    reply = m.VariableReply()
    if request.only_version:
        reply.version = variables.version(request.name)
    else:
        try:
            reply.reply = variables.execute(request.write or ReadVar(request.name))
        except GuestFault as error:
            reply.error = str(error)
    send_frame(sock, m.encode(reply))
