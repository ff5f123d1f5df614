"""Priority and deadline of a request.

Every front end creates its `RequestLimits` here. So the fields have the same meaning and the same errors in every API.
A user may raise the priority only up to the user's limit, but may always lower it. This module uses no wire format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridle.errors import DeadlineExceeded, InvalidRequest
from bridle.serving.tenancy.rate_limit import MAX_PRIORITY

if TYPE_CHECKING:
    from bridle.serving.tenancy.keys import Identity

MAX_DEADLINE = 86_400.0  # seconds


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`priority` orders the requests that wait for room; smaller numbers come first. `deadline` is in seconds after
    `since`, which is a time of the monotonic clock. The request ends at its deadline (None: no deadline). Raises
    `InvalidRequest` for values out of range."""

    priority: int = 0
    deadline: float | None = None
    since: float = field(default_factory=time.monotonic, compare=False)

    def __post_init__(self) -> None:
        priority: Any = self.priority
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequest(f"priority is a {type(priority).__name__}; must be an integer", "priority")
        if abs(priority) > MAX_PRIORITY:
            shown = priority if abs(priority) < 1 << 63 else "a number of many digits"
            raise InvalidRequest(
                f"priority is {shown}; must be between -{MAX_PRIORITY} (served first) and {MAX_PRIORITY} (served last)",
                "priority",
            )
        _check_deadline(self.deadline)

    def end(self, timeout: float | None = None) -> float | None:
        """Return the deadline as a time of the monotonic clock. If the server's `timeout`, counted from now, ends
        earlier, that time is returned."""
        ends = [] if self.deadline is None else [self.since + self.deadline]
        if timeout is not None:
            ends.append(time.monotonic() + timeout)
        return min(ends, default=None)

    def check_allowed(self, identity: Identity) -> None:
        """Raise `InvalidRequest` if this user may not use this priority."""
        limit = identity.limits.most_urgent
        if self.priority < limit and not identity.is_admin:
            raise InvalidRequest(
                f"priority is {self.priority}; user {identity.user!r} may ask for {limit} or more (smaller "
                "priorities are served first; an admin can change this with `bridle keys limit --most-urgent`)",
                "priority",
            )

    @asynccontextmanager
    async def bounded(self, doing: str) -> AsyncIterator[None]:
        """Raise `DeadlineExceeded` if the deadline passes inside the block. `doing` names the work in the block."""
        if self.deadline is None:
            yield
            return
        limit = asyncio.timeout(self.since + self.deadline - time.monotonic())
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"the request's deadline of {self.deadline:g} s passed while {doing}") from None


def _check_deadline(deadline: Any) -> None:
    if deadline is None:
        return
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)):
        raise InvalidRequest(f"deadline is a {type(deadline).__name__}; must be a number of seconds", "deadline")
    if not 0 < deadline <= MAX_DEADLINE:  # NaN fails both comparisons
        shown = f"{deadline:g}" if abs(deadline) < 1e300 else "a number of many digits"
        raise InvalidRequest(
            f"deadline is {shown}; must be more than 0 and at most {MAX_DEADLINE:g} seconds", "deadline"
        )


DEFAULT_TERMS = RequestLimits()


def make_terms(
    priority: int | None, deadline: float | None, identity: Identity, since: float | None = None
) -> RequestLimits:
    """Return the limits that a client asks for. The default priority is 0, or the user's most urgent permitted priority
    if 0 is more urgent. Raises `InvalidRequest` for a value that is out of range or not allowed to this user."""
    if priority is None:
        priority = 0 if identity.is_admin else max(identity.limits.most_urgent, 0)
        if not priority and deadline is None:
            return DEFAULT_TERMS
    terms = RequestLimits(priority, deadline, time.monotonic() if since is None else since)
    terms.check_allowed(identity)
    return terms
