"""Mapping of bridle's errors to those of clients, for every API: one table.

Each API has its own names and format for a kind of failure. The kind of each error, its HTTP status, and whether a
retry may help are the same everywhere.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from bridle.errors import (
    BridleError,
    ControllerError,
    ControllerUnavailable,
    DeadlineExceeded,
    EngineClosed,
    EngineFailed,
    InternalError,
    InvalidRequest,
    ModelUnavailable,
    OutOfBlocks,
    Overloaded,
    ProtocolError,
    RequestCancelled,
    ShardUnavailable,
    TemplateFailure,
    Unauthorized,
    UnknownAdapter,
    UnknownBatch,
    UnknownCache,
    UnknownControlVector,
    UnknownConversation,
    UnknownFile,
    UnknownModel,
    UnknownResponse,
    UnknownTrace,
)
from bridle.safe_repr import public_text

_MAX_ERROR_CHARS = 4_000


class ErrorKind(Enum):
    """Kind of an error, as the client sees it."""

    UNAUTHORIZED = "unauthorized"
    INVALID = "invalid"  # the request cannot be served as it stands
    TEMPLATE = "template"  # the conversation cannot be rendered
    CONTROLLER = "controller"  # its controller broke a rule
    OVERLOADED = "overloaded"  # there is no room for this client now
    BUSY = "busy"  # there is nothing to serve it with now
    LOST = "lost"  # a process that it needs is gone
    CANCELLED = "cancelled"
    LATE = "late"  # its own time is up
    BUG = "bug"


class MappedError(NamedTuple):
    """`status` is the HTTP status. An error that `may_pass` does not concern the request itself."""

    kind: ErrorKind
    status: int
    may_pass: bool = False


# The first class that matches decides: subclasses come before their bases.
_TABLE: tuple[tuple[type[BridleError], MappedError], ...] = (
    (Unauthorized, MappedError(ErrorKind.UNAUTHORIZED, 401)),
    (UnknownModel, MappedError(ErrorKind.INVALID, 404)),
    (UnknownAdapter, MappedError(ErrorKind.INVALID, 404)),
    (UnknownControlVector, MappedError(ErrorKind.INVALID, 404)),
    (UnknownTrace, MappedError(ErrorKind.INVALID, 404)),
    (UnknownResponse, MappedError(ErrorKind.INVALID, 404)),
    (UnknownConversation, MappedError(ErrorKind.INVALID, 404)),
    (UnknownFile, MappedError(ErrorKind.INVALID, 404)),
    (UnknownBatch, MappedError(ErrorKind.INVALID, 404)),
    (UnknownCache, MappedError(ErrorKind.INVALID, 404)),
    (TemplateFailure, MappedError(ErrorKind.TEMPLATE, 400)),
    (InvalidRequest, MappedError(ErrorKind.INVALID, 400)),
    (ProtocolError, MappedError(ErrorKind.INVALID, 400)),
    (ControllerUnavailable, MappedError(ErrorKind.LOST, 503, may_pass=True)),
    (ControllerError, MappedError(ErrorKind.CONTROLLER, 422)),
    (Overloaded, MappedError(ErrorKind.OVERLOADED, 429, may_pass=True)),
    (RequestCancelled, MappedError(ErrorKind.CANCELLED, 499)),
    (OutOfBlocks, MappedError(ErrorKind.BUSY, 503, may_pass=True)),
    (ShardUnavailable, MappedError(ErrorKind.LOST, 503, may_pass=True)),
    (ModelUnavailable, MappedError(ErrorKind.BUSY, 503, may_pass=True)),
    (EngineClosed, MappedError(ErrorKind.BUSY, 503, may_pass=True)),
    (DeadlineExceeded, MappedError(ErrorKind.LATE, 504)),
)
_UNKNOWN = MappedError(ErrorKind.BUG, 500)


def failure_of(error: BridleError) -> MappedError:
    """Return the error as the client receives it."""
    return next((failure for kind, failure in _TABLE if isinstance(error, kind)), _UNKNOWN)


def retry_after(error: BridleError) -> float | None:
    """In how many seconds to ask again, if that is known."""
    return (
        error.retry_after if isinstance(error, (Overloaded, ModelUnavailable, ShardUnavailable, EngineFailed)) else None
    )


def error_text(error: BridleError, *, hides_bugs: bool = True) -> str:
    """Return the text of an error for the client, of bounded length. Internal errors get a generic text unless
    `hides_bugs` is False."""
    is_hidden = hides_bugs and isinstance(error, InternalError)
    text = "internal error; the server's log has more" if is_hidden else public_text(error)
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
