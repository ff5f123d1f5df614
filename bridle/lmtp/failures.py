"""Converts bridle's errors to the answers with which streams end."""

from __future__ import annotations

from bridle import error_mapping
from bridle.error_mapping import error_text
from bridle.errors import BridleError
from bridle.lmtp.messages import Failure, StreamId

__all__ = ["error_text", "failure_of"]


def failure_of(stream_id: StreamId, error: BridleError) -> Failure:
    """Return the answer that ends a stream with `error`."""
    return Failure(
        stream_id=stream_id,
        error=error_text(error),
        code=error.code,
        retryable=error_mapping.failure_of(error).may_pass,
        retry_after=error_mapping.retry_after(error),
        param=getattr(error, "param", None),
    )
