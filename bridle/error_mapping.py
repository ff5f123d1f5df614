"""Maps bridle's errors to the errors that clients get, in one table for all APIs.

Each API has its own names and format for each kind of error. All APIs agree on the kind of an error, on its HTTP
status, and on whether a retry may help.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from bridle import errors
from bridle.safe_repr import public_text

_MAX_ERROR_CHARS = 4_000


class ErrorKind(Enum):
    """The kind of an error, as the client sees it."""

    UNAUTHORIZED = "unauthorized"
    INVALID = "invalid"  # the request cannot be served in this form
    TEMPLATE = "template"  # the conversation cannot be rendered
    CONTROLLER = "controller"  # the request's controller broke a rule
    OVERLOADED = "overloaded"  # there is no room for this client now
    BUSY = "busy"  # the model or runtime for the request is not available now
    LOST = "lost"  # a process that the request needs has ended
    CANCELLED = "cancelled"
    LATE = "late"  # the request's own deadline has passed
    BUG = "bug"


class MappedError(NamedTuple):
    """An error in the form that a client gets. `status` is the HTTP status. If `may_pass` is set, the request is not
    the cause of the error, so a retry may help."""

    kind: ErrorKind
    status: int
    may_pass: bool = False


# The first class that matches is used, so subclasses come before their bases.
_TABLE: tuple[tuple[type[errors.BridleError], MappedError], ...] = (
    (errors.Unauthorized, MappedError(ErrorKind.UNAUTHORIZED, 401)),
    (errors.UnknownModel, MappedError(ErrorKind.INVALID, 404)),
    (errors.UnknownAdapter, MappedError(ErrorKind.INVALID, 404)),
    (errors.UnknownControlVector, MappedError(ErrorKind.INVALID, 404)),
    (errors.UnknownTrace, MappedError(ErrorKind.INVALID, 404)),
    (errors.UnknownResponse, MappedError(ErrorKind.INVALID, 404)),
    (errors.UnknownConversation, MappedError(ErrorKind.INVALID, 404)),
    (errors.UnknownFile, MappedError(ErrorKind.INVALID, 404)),
    (errors.UnknownBatch, MappedError(ErrorKind.INVALID, 404)),
    (errors.UnknownCache, MappedError(ErrorKind.INVALID, 404)),
    (errors.TemplateFailure, MappedError(ErrorKind.TEMPLATE, 400)),
    (errors.InvalidRequest, MappedError(ErrorKind.INVALID, 400)),
    (errors.ProtocolError, MappedError(ErrorKind.INVALID, 400)),
    (errors.ControllerUnavailable, MappedError(ErrorKind.LOST, 503, may_pass=True)),
    (errors.ControllerError, MappedError(ErrorKind.CONTROLLER, 422)),
    (errors.Overloaded, MappedError(ErrorKind.OVERLOADED, 429, may_pass=True)),
    (errors.RequestCancelled, MappedError(ErrorKind.CANCELLED, 499)),
    (errors.OutOfBlocks, MappedError(ErrorKind.BUSY, 503, may_pass=True)),
    (errors.ShardUnavailable, MappedError(ErrorKind.LOST, 503, may_pass=True)),
    (errors.ModelUnavailable, MappedError(ErrorKind.BUSY, 503, may_pass=True)),
    (errors.EngineClosed, MappedError(ErrorKind.BUSY, 503, may_pass=True)),
    (errors.DeadlineExceeded, MappedError(ErrorKind.LATE, 504)),
)
_UNKNOWN = MappedError(ErrorKind.BUG, 500)


def failure_of(error: errors.BridleError) -> MappedError:
    """Return the error in the form that the client receives."""
    return next((failure for kind, failure in _TABLE if isinstance(error, kind)), _UNKNOWN)


def retry_after(error: errors.BridleError) -> float | None:
    """Return the number of seconds after which a retry may help; None if unknown."""
    return (
        error.retry_after
        if isinstance(error, (errors.Overloaded, errors.ModelUnavailable, errors.ShardUnavailable, errors.EngineFailed))
        else None
    )


def error_text(error: errors.BridleError, *, hides_bugs: bool = True) -> str:
    """Return the text of an error for the client, limited in length. An internal error gets a generic text, unless
    `hides_bugs` is False."""
    is_hidden = hides_bugs and isinstance(error, errors.InternalError)
    text = "internal error; the server's log has more" if is_hidden else public_text(error)
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
