"""Converts bridle's errors to what a client is told: text, code, and whether another try may help."""

from __future__ import annotations

from bridle.errors import (
    BridleError,
    ControllerUnavailable,
    EngineClosed,
    InternalError,
    ModelUnavailable,
    OutOfBlocks,
    Overloaded,
    ShardUnavailable,
)
from bridle.lmtp.messages import Failure, StreamId
from bridle.shown import public_text

#: Errors that say nothing against the request itself.
_RETRYABLE = (Overloaded, OutOfBlocks, ShardUnavailable, ModelUnavailable, EngineClosed, ControllerUnavailable)
_MAX_ERROR_CHARS = 4_000


def failure_of(stream_id: StreamId, error: BridleError) -> Failure:
    """The answer that ends a stream with `error`."""
    return Failure(
        stream_id=stream_id,
        error=error_text(error),
        code=error.code,
        retryable=isinstance(error, _RETRYABLE),
        retry_after=error.retry_after if isinstance(error, (Overloaded, ModelUnavailable)) else None,
        param=getattr(error, "param", None),
    )


def error_text(error: BridleError) -> str:
    """The text for a client. Of a bug it says only that it is one."""
    text = "internal error; the server's log has more" if isinstance(error, InternalError) else public_text(error)
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
