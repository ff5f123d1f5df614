"""What a router and a replica say to each other: requests one way, events the other, one frame per step.

A replica is a whole engine in a process of its own. Messages are MessagePack in frames of four bytes of length; both
ends are processes of one server, on a unix socket that only its user can open.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import fields
from typing import Any

import msgspec

from bridle.cluster.adapter_messages import AdapterFetched, AdapterMessage, AdapterNews
from bridle.cluster.controller_forms import pack_controller, unpack_controller
from bridle.cluster.faults import pack_error, unpack_error
from bridle.controllers.free_part import Grammar
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import Request
from bridle.engine.statistics import EngineStatistics
from bridle.errors import ProtocolError, UnsupportedFeature
from bridle.lora import AdapterLimits
from bridle.outputs import (
    Embedded,
    Event,
    Finished,
    FinishReason,
    Forked,
    Log,
    Logprob,
    PromptEvent,
    Resuming,
    Rewind,
    Stored,
    TokenEvent,
    Usage,
)
from bridle.sampling import SamplingParams

PROTOCOL = 1
MAX_FRAME_BYTES = 64 << 20
HEADER = struct.Struct(">I")


class _Wire(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all messages."""


# -- router to replica ---------------------------------------------------------------------------------------


class Submit(_Wire):
    """A request. `controller` is the plain form of what steers it, `generated` are tokens that it had elsewhere
    already, `metadata` what goes along with it, such as the trace that it belongs to."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    controller: dict[str, Any] | None
    adapter: str | None
    deadline: float | None
    tenant: str
    priority: int
    turn: float
    detokenize: bool
    tell_resuming: bool
    generated: tuple[int, ...]
    metadata: dict[str, str] = {}
    embeds: bool = False


class Cancel(_Wire):
    id: str


# -- replica to router ---------------------------------------------------------------------------------------


class Hello(_Wire):
    """The first message of a replica."""

    protocol: int
    pid: int
    info: ExecutorInfo
    max_forks: int
    max_waiting: int
    adapters: AdapterLimits | None = None  # what it takes as adapters


class Prompt(_Wire):
    request_id: str
    index: int
    tokens: tuple[int, ...]
    num_cached: int
    logprobs: tuple[Logprob | None, ...]
    queued: float
    opening: float = 0.0


class Token(_Wire):
    request_id: str
    index: int
    token: int
    text: str
    logprob: Logprob | None
    forced: bool


class TakenBack(_Wire):
    request_id: str
    index: int
    num_tokens: int
    num_chars: int


class Fork(_Wire):
    request_id: str
    index: int
    parent: int
    num_tokens: int
    text: str


class Said(_Wire):
    request_id: str
    index: int
    text: str


class Wrote(_Wire):
    request_id: str
    index: int
    name: str
    value: bytes
    is_append: bool


class Waits(_Wire):
    request_id: str
    index: int


class End(_Wire):
    request_id: str
    index: int
    reason: FinishReason
    usage: Usage
    text: str
    stop: int | str | None
    error: tuple[str, str, str | None] | None
    is_last: bool
    held: float = 0.0


class Vector(_Wire):
    """What became of a prompt, as 32-bit numbers in this machine's order."""

    request_id: str
    index: int
    values: bytes


WireEvent = Vector | Prompt | Token | TakenBack | Fork | Said | Wrote | Waits | End


class Events(_Wire):
    events: list[WireEvent]


class Broken(_Wire):
    """A stream that ended without its last event."""

    request_id: str
    error: tuple[str, str, str | None]


class Beat(_Wire):
    """A sign of life, several times a second, with the engine's counters."""

    is_healthy: bool
    numbers: dict[str, float]
    finished: dict[str, int]
    adapters: dict[str, AdapterNews] = {}


#: All that a replica is told.
ToReplica = Submit | Cancel | AdapterMessage
#: All that it says after its greeting.
ToRouter = Events | Broken | Beat | AdapterFetched

_TO_REPLICA = msgspec.msgpack.Decoder(ToReplica)
_TO_ROUTER = msgspec.msgpack.Decoder(Hello | ToRouter)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A message for a carrier that keeps messages apart."""
    return _ENCODER.encode(message)


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length in front."""
    data = encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message has {len(data)} bytes; at most {MAX_FRAME_BYTES}")
    return HEADER.pack(len(data)) + data


def read_by_replica(data: bytes) -> ToReplica:
    return _decode(_TO_REPLICA, data)  # type: ignore[no-any-return]


def read_by_router(data: bytes) -> Hello | ToRouter:
    return _decode(_TO_ROUTER, data)  # type: ignore[no-any-return]


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes came that are no message: {error}") from error


# -- values ----------------------------------------------------------------------------------------------------


def pack_request(request: Request) -> Submit:
    """Raises `UnsupportedFeature` for what exists in one process only."""
    if request.stopping:
        raise UnsupportedFeature("stopping criteria of your own need an engine in this process", "stopping")
    return Submit(
        request.id,
        request.prompt,
        request.sampling,
        pack_controller(request.controller),
        request.adapter,
        request.deadline,
        request.tenant,
        request.priority,
        request.turn,
        request.detokenize,
        request.tell_resuming,
        request.generated,
        request.metadata,
        request.embeds,
    )


def unpack_request(message: Submit, grammar: Grammar | None = None) -> Request:
    """The request; `grammar` is that of `form_to_compile`, if it has one."""
    return Request(
        message.id,
        message.prompt,
        message.sampling,
        controller=unpack_controller(message.controller, grammar),
        adapter=message.adapter,
        deadline=message.deadline,
        tenant=message.tenant,
        priority=message.priority,
        turn=message.turn,
        detokenize=message.detokenize,
        tell_resuming=message.tell_resuming,
        generated=message.generated,
        metadata=message.metadata,
        embeds=message.embeds,
    )


def pack_event(event: Event) -> WireEvent:
    match event:
        case TokenEvent(request_id, index, token, text, logprob, forced):
            return Token(request_id, index, token, text, logprob, forced)
        case PromptEvent():
            logprobs = event.logprobs
            return Prompt(
                event.request_id, event.index, event.tokens, event.num_cached, logprobs, event.queued, event.opening
            )
        case Embedded(request_id, index, vector):
            return Vector(request_id, index, vector.tobytes())
        case Rewind(request_id, index, num_tokens, num_chars):
            return TakenBack(request_id, index, num_tokens, num_chars)
        case Forked(request_id, index, parent, num_tokens, text):
            return Fork(request_id, index, parent, num_tokens, text)
        case Log(request_id, index, text):
            return Said(request_id, index, text)
        case Stored(request_id, index, name, value, is_append):
            return Wrote(request_id, index, name, value, is_append)
        case Finished():
            error = None if event.error is None else pack_error(event.error)
            return End(
                event.request_id,
                event.index,
                event.reason,
                event.usage,
                event.text,
                event.stop,
                error,
                event.is_last,
                event.held,
            )
        case _:
            return Waits(event.request_id, event.index)


def unpack_event(message: WireEvent) -> Event:
    match message:
        case Token(request_id, index, token, text, logprob, forced):
            return TokenEvent(request_id, index, token, text, logprob, forced)
        case Prompt(request_id, index, tokens, num_cached, logprobs, queued, opening):
            return PromptEvent(request_id, index, tokens, num_cached, logprobs, queued, opening)
        case Vector(request_id, index, values):
            return Embedded(request_id, index, array("f", values))
        case TakenBack(request_id, index, num_tokens, num_chars):
            return Rewind(request_id, index, num_tokens, num_chars)
        case Fork(request_id, index, parent, num_tokens, text):
            return Forked(request_id, index, parent, num_tokens, text)
        case Said(request_id, index, text):
            return Log(request_id, index, text)
        case Wrote(request_id, index, name, value, is_append):
            return Stored(request_id, index, name, value, is_append)
        case End(request_id, index, reason, usage, text, stop, error, is_last, held):
            known = None if error is None else unpack_error(*error)
            return Finished(request_id, index, reason, usage, text, stop, known, is_last, held)
        case _:
            return Resuming(message.request_id, message.index)


def pack_beat(is_healthy: bool, statistics: EngineStatistics, adapters: dict[str, AdapterNews] | None = None) -> Beat:
    numbers = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    plain = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
    return Beat(is_healthy, plain, dict(statistics.finished), adapters or {})


def add_beat(total: EngineStatistics, beat: Beat) -> None:
    """Add a replica's counters to the sum of all."""
    for name, value in beat.numbers.items():
        if isinstance(getattr(total, name, None), int | float):
            setattr(total, name, type(getattr(total, name))(getattr(total, name) + value))
    total.finished.update(beat.finished)
