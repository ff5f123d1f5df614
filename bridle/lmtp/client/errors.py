"""A server's failure as an exception of ours."""

from __future__ import annotations

from bridle import errors
from bridle.lmtp.messages import Failure

_PLAIN = (
    errors.UnsupportedModel,
    errors.Unauthorized,
    errors.OutOfBlocks,
    errors.ControllerError,
    errors.ControllerTimeout,
    errors.ControllerTrap,
    errors.ControllerUnavailable,
    errors.ShardUnavailable,
    errors.ProtocolError,
    errors.RequestCancelled,
    errors.DeadlineExceeded,
    errors.EngineClosed,
)
_INVALID = (errors.InvalidRequest, errors.ContextOverflow, errors.UnsupportedFeature, errors.UnknownModel)
_PLAIN_KINDS = {kind.code: kind for kind in _PLAIN}
_INVALID_KINDS = {kind.code: kind for kind in _INVALID}


def error_of(failure: Failure) -> errors.BridleError:
    """The error that the server named, of the same class; `RemoteError` if there is none of that name here."""
    if failure.code in _INVALID_KINDS:
        return _INVALID_KINDS[failure.code](failure.error, failure.param)
    if failure.code == errors.Overloaded.code:
        return errors.Overloaded(failure.error, failure.retry_after or 1.0)
    if failure.code in _PLAIN_KINDS:
        return _PLAIN_KINDS[failure.code](failure.error)
    return errors.RemoteError(failure.error, str(failure.code), is_retryable=failure.retryable is True)
