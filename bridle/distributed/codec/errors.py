"""Encodes errors for other processes as kind, message and field. The engine gets the same error that the shard raised.

The kind distinguishes two cases that the engine treats differently: a request made a step fail, or a device is lost.
"""

from __future__ import annotations

from functools import cache

from bridle.distributed.proto import shard_pb2 as pb
from bridle.errors import BridleError, ControllerError, InternalError, InvalidRequest

_MAX_CHARS = 4096


def encode_failure(step: int, error: Exception) -> pb.Failure:
    """Encode the error of a failed step. An exception that is not a `BridleError` is reported as a bug of bridle."""
    if not isinstance(error, BridleError) or isinstance(error, ControllerError):
        error = InternalError(f"the shard failed: {error!r}")
    code, message, param = pack_error(error)
    return pb.Failure(step=step, code=code, message=message, param=param)


def decode_failure(message: pb.Failure) -> BridleError:
    """Decode an error, ready to be raised."""
    return unpack_error(message.code, message.message, message.param if message.HasField("param") else None)


def pack_error(error: BridleError) -> tuple[str, str, str | None]:
    """Return a `BridleError` as plain values: kind, message, field."""
    text = str(error)
    text = text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
    return error.code, text, error.param if isinstance(error, InvalidRequest) else None


def unpack_error(code: str, message: str, param: str | None) -> BridleError:
    """Return the error with this kind, message and field. An unknown kind becomes an `InternalError`."""
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
