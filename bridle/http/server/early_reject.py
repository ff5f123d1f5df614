"""Answers some requests after reading only their headers: health checks, and requests that an overloaded server
refuses.

An overloaded server gets the most requests, because refused clients retry at once. So refusals must be cheap: the body
is not read, no task begins, and a refusal is not logged separately. The application handles all other requests, and
decides by the same rules.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import structlog
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from bridle.errors import BridleError, Overloaded, Unauthorized
from bridle.http.errors import Refuse
from bridle.http.middleware.request_context import MODEL_ROUTES, Identify, RequestContext, id_headers
from bridle.http.middleware.trusted_hosts import UnknownHost
from bridle.http.state import HttpState
from bridle.serving import new_request_id
from bridle.serving.tenancy.keys import LOCAL_USER, Identity

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.http")
_LOG_INTERVAL = 1.0  # seconds

#: Answers a health probe at a path; None for any other path.
Probe = Callable[[HttpState, str], Response | None]


class DoorAnswer(NamedTuple):
    """A complete response. `user` is throttled after too many refusals; it is None for a health check."""

    response: Response
    user: str | None


class EarlyRejector:
    """Answers or passes on requests, according to their headers. `identify` and `refuse` are functions of the
    application."""

    def __init__(self, http: HttpState, identify: Identify, refuse: Refuse, probe: Probe) -> None:
        self._http = http
        self._identify = identify
        self._refuse = refuse
        self._probe = probe
        self._refused: Counter[str] = Counter()
        self._has_cors = bool(http.settings.cors_origins)

    def answer(self, scope: Scope) -> DoorAnswer | None:
        """Return the response to a request; None if the application must handle the request."""
        method, path = scope["method"], scope["path"]
        if self._has_cors and any(name == b"origin" for name, _ in scope["headers"]):
            return None  # browsers need CORS headers, which the application adds
        if method == "GET":
            found = self._probe(self._http, path)
            return None if found is None else DoorAnswer(found, None)
        if method != "POST" or path not in MODEL_ROUTES or self._http.is_draining:
            return None
        identity = None
        try:
            identity = self._identify(HTTPConnection(scope)) or LOCAL_USER
            self._http.admission.check(identity.user, identity.limits)
        except UnknownHost:
            return None  # rare; the application answers it with its own status
        except (Overloaded, Unauthorized) as error:
            return self._refusal(scope, identity, error)
        return None

    def _refusal(self, scope: Scope, identity: Identity | None, error: BridleError) -> DoorAnswer:
        """Return the response to a refused request, and count the refusal."""
        path, peer = scope["path"], scope.get("client") or ("",)
        call = RequestContext(
            id=new_request_id(), route=f"POST {path}", method="POST", path=path, identity=identity, error=error
        )
        user = peer[0] if identity is None else identity.user
        response = self._refuse(path, error, None)
        response.raw_headers += id_headers(call)
        call.status = response.status_code
        self._http.metrics.observe(call, 0.0)
        self._note(user)
        return DoorAnswer(response, user)

    def _note(self, user: str) -> None:
        """Count a refusal. One log line per second reports all refusals."""
        if not self._refused:
            asyncio.get_running_loop().call_later(_LOG_INTERVAL, self._tell)
        self._refused[user] += 1

    def _tell(self) -> None:
        refused, self._refused = self._refused, Counter()
        most = ", ".join(user for user, _ in refused.most_common(3))
        _log.info(
            "requests were refused before their bodies were read",
            requests=refused.total(),
            users=len(refused),
            most=most,
        )
