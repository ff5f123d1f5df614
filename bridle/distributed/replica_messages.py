"""The messages between a router and a replica: requests to the replica, and events to the router. The events of a step
are one frame.

A replica is a whole engine in a separate process. Each message is MessagePack in a frame with four bytes of length.
Both ends are processes of one server, on a unix socket that only its user can open.
"""

from __future__ import annotations

import functools
import operator
import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, get_type_hints

import msgspec

from bridle.controllers.reasoning_gate import CompiledGrammar
from bridle.distributed.adapter_messages import AdapterFetched, AdapterMessage, AdapterNews, Wire
from bridle.distributed.codec.controllers import pack_controller, unpack_controller
from bridle.distributed.codec.errors import pack_error, unpack_error
from bridle.distributed.replica_vectors import VectorMessage, VectorSizes
from bridle.distributed.tool_messages import ToolAnswered, ToolAsked, ToolGivenUp
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import Request
from bridle.engine.statistics import EngineStatistics
from bridle.errors import MediaRefused, ProtocolError, UnsupportedFeature
from bridle.lora import AdapterLimits
from bridle.outputs import Event
from bridle.sampling_values import LogitBias
from bridle.traces import decode_record, encode_record, made

PROTOCOL = 6
MAX_FRAME_BYTES = 64 << 20
#: Maximum bytes of a request's images in a frame, as pixel values.
MAX_MEDIA_BYTES = 48 << 20
HEADER = struct.Struct(">I")


# -- router to replica ---------------------------------------------------------------------------------------


class Submit(Wire):
    """Router to replica: run this `Request`. The `controller` is plain data."""

    request: Request
    controller: dict[str, Any] | None


class CancelRequest(Wire, tag="Cancel"):
    id: str


class Unpark(Wire):
    """Router to replica: release the retained KV of a finished request."""

    id: str


# -- replica to router ---------------------------------------------------------------------------------------


class Handshake(Wire, tag="Hello"):
    """The first message of a replica."""

    protocol: int
    pid: int
    info: ExecutorInfo
    max_forks: int
    max_waiting: int
    adapters: AdapterLimits | None = None  # limits of adapters that the replica supports
    park_seconds: float = 0.0  # seconds for which the replica parks KV; 0 if it does not park KV
    vectors: VectorSizes | None = None  # sizes of control vectors that the replica supports


#: Fields of events that have another form on the wire: the type of this form, and the functions that convert to it and
#: back. A trace record is a line of its file, a vector 32-bit numbers in this machine's order.
_FORMS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "error": (
        tuple[str, str, str | None] | None,
        lambda error: None if error is None else pack_error(error),
        lambda form: None if form is None else unpack_error(*form),
    ),
    "told": (bytes, lambda told: encode_record(made(told)), decode_record),
    "vector": (bytes, lambda vector: vector.tobytes(), lambda data: array("f", data)),
}


class WireEvent(Wire):
    """Base of the messages that carry an event."""

    request_id: str
    index: int


class Form:
    """Converts one kind of event to a message of the same name with the same fields, in the same order, and back."""

    def __init__(self, kind: type[Event]) -> None:
        self.kind = kind
        types = get_type_hints(kind, localns={"array": list})  # `array[...]` is not a type before Python 3.12
        self.names = tuple(field.name for field in fields(kind))
        self.converted = [(i, *_FORMS[name][1:]) for i, name in enumerate(self.names) if name in _FORMS]
        own = [name for name in self.names if name not in WireEvent.__struct_fields__]
        wire = [(name, _FORMS[name][0] if name in _FORMS else types[name]) for name in own]
        self.message: type[Any] = msgspec.defstruct(kind.__name__, wire, bases=(WireEvent,), module=__name__)
        self._values = attrgetter(*self.names)

    def pack(self, event: Event) -> WireEvent:
        values = list(self._values(event))
        for i, pack, _ in self.converted:
            values[i] = pack(values[i])
        packed: WireEvent = self.message(*values)
        return packed

    def unpack(self, message: WireEvent) -> Event:
        values = list(self._values(message))
        for i, _, unpack in self.converted:
            values[i] = unpack(values[i])
        return self.kind(*values)


def _kinds() -> list[type[Event]]:
    """Return the classes of events. A dataclass with slots creates a second class of the same name. The first class
    remains among the subclasses until it is garbage-collected, and is left out."""
    return [kind for kind in Event.__subclasses__() if getattr(sys.modules[kind.__module__], kind.__name__) is kind]


FORM_OF: dict[type[Event], Form] = {kind: Form(kind) for kind in _kinds()}
_KIND_OF = {form.message: form for form in FORM_OF.values()}
_AnyEvent = functools.reduce(operator.or_, _KIND_OF)


class Events(Wire):
    events: list[_AnyEvent]  # type: ignore[valid-type]


class RequestFailed(Wire, tag="Broken"):
    """Replica to router: an event stream ended with an error instead of its last event."""

    request_id: str
    error: tuple[str, str, str | None]


class Heartbeat(Wire, tag="Beat"):
    """Replica to router: a heartbeat, sent several times a second, with the engine's counters."""

    is_healthy: bool
    numbers: dict[str, float]
    finished: dict[str, int]
    adapters: dict[str, AdapterNews] = msgspec.field(default_factory=dict)
    policies: dict[str, int] = msgspec.field(default_factory=dict)
    tenant_blocks: dict[str, int] = msgspec.field(default_factory=dict)


#: All messages that a router sends to a replica.
ToReplica = Submit | CancelRequest | Unpark | AdapterMessage | VectorMessage | ToolAnswered
#: All messages that a replica sends to its router after its `Handshake`.
ToRouter = Events | RequestFailed | Heartbeat | AdapterFetched | ToolAsked | ToolGivenUp

_TO_REPLICA = msgspec.msgpack.Decoder(ToReplica)
_TO_ROUTER = msgspec.msgpack.Decoder(Handshake | ToRouter)


def _plain(value: Any) -> Any:
    """Convert packed logit biases to a dictionary, which is also their type after decoding."""
    if isinstance(value, LogitBias):
        return dict(value)
    raise NotImplementedError(f"a value of type {type(value).__name__} cannot be sent to a replica")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message for a transport that separates messages."""
    return _ENCODER.encode(message)


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message, preceded by its length."""
    data = encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message between server and replica has {len(data)} bytes; at most {MAX_FRAME_BYTES}")
    return HEADER.pack(len(data)) + data


def read_by_replica(data: bytes) -> ToReplica:
    return _decode(_TO_REPLICA, data)  # type: ignore[no-any-return]


def read_by_router(data: bytes) -> Handshake | ToRouter:
    return _decode(_TO_ROUTER, data)  # type: ignore[no-any-return]


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes between server and replica are not a valid message: {error}") from error


# -- values ----------------------------------------------------------------------------------------------------


def pack_request(request: Request) -> Submit:
    """Convert a request to a message. Raises `UnsupportedFeature` for objects that exist only in this process, and
    `MediaRefused` for images that are too large for a message."""
    if request.stopping:
        raise UnsupportedFeature(
            "stopping: custom stopping criteria need an engine in this process; replicas do not support them",
            "stopping",
        )
    num_bytes = sum(medium.num_bytes for medium in request.media)
    if num_bytes > MAX_MEDIA_BYTES:
        raise MediaRefused(
            f"the request's images have {num_bytes} bytes after preprocessing; at most {MAX_MEDIA_BYTES} can be sent "
            "to a replica"
        )
    plain = request if request.controller is None else replace(request, controller=None)
    return Submit(plain, pack_controller(request.controller))


def unpack_request(message: Submit, grammar: CompiledGrammar | None = None) -> Request:
    """Convert a message to a request. `grammar` is the compiled constraint from `form_to_compile`, if the controller
    needs it."""
    controller = unpack_controller(message.controller, grammar)
    return message.request if controller is None else replace(message.request, controller=controller)


def pack_event(event: Event) -> WireEvent:
    """Convert an event to a message of the same name."""
    return FORM_OF[type(event)].pack(event)


def unpack_event(message: WireEvent) -> Event:
    """Convert a message to the event of the same name."""
    return _KIND_OF[type(message)].unpack(message)


def pack_beat(
    is_healthy: bool, statistics: EngineStatistics, adapters: dict[str, AdapterNews] | None = None
) -> Heartbeat:
    numbers = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    plain = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
    finished, policies, blocks = dict(statistics.finished), dict(statistics.policies), dict(statistics.tenant_blocks)
    return Heartbeat(is_healthy, plain, finished, adapters or {}, policies, blocks)


def add_beat(total: EngineStatistics, beat: Heartbeat) -> None:
    """Add a replica's counters to the sum over all replicas."""
    for name, value in beat.numbers.items():
        if isinstance(getattr(total, name, None), int | float):
            setattr(total, name, type(getattr(total, name))(getattr(total, name) + value))
    total.finished.update(beat.finished)
    total.policies.update(beat.policies)
    total.tenant_blocks.update(beat.tenant_blocks)
