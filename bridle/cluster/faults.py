"""Errors on the wire: kind, sentence and the field at fault. The engine sees the error that the shard raised.

The kinds separate two cases that the engine treats differently: one request made a step fail, or a device is lost.
"""

from __future__ import annotations

from functools import cache

from bridle.cluster.proto import shard_pb2 as pb
from bridle.errors import (
    AdapterRefused,
    BridleError,
    ContextOverflow,
    InternalError,
    InvalidRequest,
    MediaRefused,
    ModelUnavailable,
    OutOfBlocks,
    ProtocolError,
    ShardUnavailable,
    UnsupportedFeature,
    UnsupportedModel,
)

#: The kinds of errors that an executor may raise.
_KINDS: dict[str, type[BridleError]] = {
    kind.code: kind
    for kind in (
        AdapterRefused,
        BridleError,
        ContextOverflow,
        InternalError,
        InvalidRequest,
        MediaRefused,
        ModelUnavailable,
        OutOfBlocks,
        ProtocolError,
        ShardUnavailable,
        UnsupportedFeature,
        UnsupportedModel,
    )
}
_MAX_CHARS = 4096


def encode_failure(step: int, error: Exception) -> pb.Failure:
    """The failure of a step as a message. An error that is not a `BridleError` is reported as a bug of bridle."""
    if not isinstance(error, BridleError):
        error = InternalError(f"the shard failed: {error!r}")
    message = str(error)
    return pb.Failure(
        step=step,
        code=error.code if error.code in _KINDS else InternalError.code,
        message=message if len(message) <= _MAX_CHARS else message[:_MAX_CHARS] + "...",
        param=error.param if isinstance(error, InvalidRequest) else None,
    )


def decode_failure(message: pb.Failure) -> BridleError:
    """The error that the message describes, ready to be raised."""
    kind = _KINDS.get(message.code, InternalError)
    if issubclass(kind, InvalidRequest):
        return kind(message.message, message.param if message.HasField("param") else None)
    return kind(message.message)


def pack_error(error: BridleError) -> tuple[str, str, str | None]:
    """Any `BridleError` as plain values: kind, sentence, field at fault."""
    return error.code, str(error)[:_MAX_CHARS], error.param if isinstance(error, InvalidRequest) else None


def unpack_error(code: str, message: str, param: str | None) -> BridleError:
    """The error with these values. An unknown kind becomes an `InternalError`."""
    kind = _all_kinds().get(code, InternalError)
    return kind(message, param) if issubclass(kind, InvalidRequest) else kind(message)


@cache
def _all_kinds() -> dict[str, type[BridleError]]:
    found: dict[str, type[BridleError]] = {}
    pending: list[type[BridleError]] = [BridleError]
    while pending:
        kind = pending.pop()
        found.setdefault(kind.code, kind)
        pending += kind.__subclasses__()
    return found
