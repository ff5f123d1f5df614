"""Converts a server's failure to one of bridle's exceptions."""

from __future__ import annotations

from collections.abc import Iterator

from bridle.errors import BridleError, InvalidRequest, Overloaded, RemoteError
from bridle.lmtp.messages import Failure


def error_of(failure: Failure) -> BridleError:
    """Return an exception of the class that the server named; `RemoteError` if this version has no such class."""
    kind = _KINDS.get(failure.code, RemoteError)
    if issubclass(kind, InvalidRequest):
        return kind(failure.error, failure.param)
    if issubclass(kind, Overloaded):
        return kind(failure.error, failure.retry_after or 1.0)
    if issubclass(kind, RemoteError):
        return kind(failure.error, str(failure.code), is_retryable=failure.retryable is True)
    return kind(failure.error)


def _kinds(base: type[BridleError]) -> Iterator[type[BridleError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


_KINDS = {kind.code: kind for kind in _kinds(BridleError) if kind.__module__ == BridleError.__module__}
_KINDS.pop(RemoteError.code, None)
