"""The control vectors of several replicas. The router keeps the list of vectors; each replica has all vectors of the
list, by name.

A replica gets each change of the list before the requests that are sent after the change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from bridle.control_vectors import ControlVectorInfo, ControlVectors
from bridle.distributed.adapter_messages import Wire
from bridle.distributed.codec.control_vectors import decode_vector, encode_vector
from bridle.distributed.proto import shard_pb2 as pb
from bridle.errors import BridleError

if TYPE_CHECKING:
    from bridle.control_vectors import Directions

_log = logging.getLogger(__name__)


class PutVector(Wire):
    """Router to replica: store this control vector under this name for later requests. `data` is a protobuf
    `ControlVector`."""

    name: str
    source: str
    data: bytes


class RemoveVector(Wire):
    name: str


#: All messages about control vectors that a router sends to a replica.
VectorMessage = PutVector | RemoveVector
#: Number of layers and hidden size of a model that applies control vectors.
VectorSizes = tuple[int, int]


def sizes_of(vectors: ControlVectors | None) -> VectorSizes | None:
    """Return the number of layers and the hidden size, for the router; None if control vectors are not supported."""
    return None if vectors is None else (vectors.num_layers, vectors.hidden_size)


class ReplicatedVectors(ControlVectors):
    """The router's list of control vectors. `send(number, message)` sends a message to replica `number`."""

    def __init__(self, sizes: VectorSizes, send: Callable[[int, VectorMessage], None]) -> None:
        super().__init__(*sizes)
        self._send = send
        self._up: set[int] = set()
        self._order = threading.RLock()  # orders changes, so that replicas get them in the order of this process

    def put(self, name: str, directions: Directions, source: str = "") -> ControlVectorInfo:
        with self._order:
            info = super().put(name, directions, source)
            self._tell(self._packed(info))
        return info

    def remove(self, name: str) -> None:
        with self._order:
            super().remove(name)
            self._tell(RemoveVector(name))

    def note_up(self, number: int) -> None:
        """Record that a replica is connected. The replica gets all vectors before any request."""
        with self._order:
            self._up.add(number)
            for info in self.list():
                self._send(number, self._packed(info))

    def note_lost(self, number: int) -> None:
        with self._order:
            self._up.discard(number)

    def _packed(self, info: ControlVectorInfo) -> PutVector:
        message = encode_vector(info.name, self.directions(info.name))
        return PutVector(info.name, info.source, message.SerializeToString())

    def _tell(self, message: VectorMessage) -> None:
        for number in self._up:
            self._send(number, message)


class RouterVectors:
    """The replica's end of the messages about control vectors, for one router."""

    def __init__(self, store: ControlVectors | None) -> None:
        self._store = store
        self._names: set[str] = set()

    def handle(self, message: VectorMessage) -> None:
        """Handle the router's message. This call may load torch, which takes seconds."""
        if self._store is None:
            return
        try:
            self._change(self._store, message)
        except BridleError as error:
            _log.error("control vector %s, which the router sent, cannot be used: %s", message.name, error)

    def _change(self, store: ControlVectors, message: VectorMessage) -> None:
        if isinstance(message, PutVector):
            found = decode_vector(pb.ControlVector.FromString(message.data), store.hidden_size)
            store.put(message.name, found, message.source)
            self._names.add(message.name)
        elif message.name in self._names:
            self._names.remove(message.name)
            store.remove(message.name)

    def close(self) -> None:
        """Remove the vectors of the router, which has disconnected."""
        for name in list(self._names):
            self.handle(RemoveVector(name))
