"""From bridle's errors to what a client is told, whichever API it speaks: one table.

Each API has words of its own for a kind of failure, and its own shape; which error is of which kind, which status it
has over HTTP, and whether asking again may help is the same everywhere.
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
    UnknownModel,
    UnknownResponse,
    UnknownTrace,
)
from bridle.shown import public_text

_MAX_ERROR_CHARS = 4_000


class Kind(Enum):
    """What went wrong, in the sense that matters to who asked."""

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


class Failure(NamedTuple):
    """`status` is that of HTTP; one that `may_pass` says nothing against the request itself."""

    kind: Kind
    status: int
    may_pass: bool = False


# The first class that matches decides: subclasses come before their bases.
_TABLE: tuple[tuple[type[BridleError], Failure], ...] = (
    (Unauthorized, Failure(Kind.UNAUTHORIZED, 401)),
    (UnknownModel, Failure(Kind.INVALID, 404)),
    (UnknownAdapter, Failure(Kind.INVALID, 404)),
    (UnknownTrace, Failure(Kind.INVALID, 404)),
    (UnknownResponse, Failure(Kind.INVALID, 404)),
    (TemplateFailure, Failure(Kind.TEMPLATE, 400)),
    (InvalidRequest, Failure(Kind.INVALID, 400)),
    (ProtocolError, Failure(Kind.INVALID, 400)),
    (ControllerUnavailable, Failure(Kind.LOST, 503, may_pass=True)),
    (ControllerError, Failure(Kind.CONTROLLER, 422)),
    (Overloaded, Failure(Kind.OVERLOADED, 429, may_pass=True)),
    (RequestCancelled, Failure(Kind.CANCELLED, 499)),
    (OutOfBlocks, Failure(Kind.BUSY, 503, may_pass=True)),
    (ShardUnavailable, Failure(Kind.LOST, 503, may_pass=True)),
    (ModelUnavailable, Failure(Kind.BUSY, 503, may_pass=True)),
    (EngineClosed, Failure(Kind.BUSY, 503, may_pass=True)),
    (DeadlineExceeded, Failure(Kind.LATE, 504)),
)
_UNKNOWN = Failure(Kind.BUG, 500)


def failure_of(error: BridleError) -> Failure:
    """What a client is told of an error."""
    return next((failure for kind, failure in _TABLE if isinstance(error, kind)), _UNKNOWN)


def retry_after(error: BridleError) -> float | None:
    """In how many seconds to ask again, if that is known."""
    return error.retry_after if isinstance(error, (Overloaded, ModelUnavailable)) else None


def error_text(error: BridleError, *, hides_bugs: bool = True) -> str:
    """What a client reads, of a bounded length. Unless told otherwise, of a bug it learns no more than that it is
    one."""
    is_hidden = hides_bugs and isinstance(error, InternalError)
    text = "internal error; the server's log has more" if is_hidden else public_text(error)
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
