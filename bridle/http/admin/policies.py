"""Routes for policies, which only admins may use: list the active policies, and reload the policy file."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.http.middleware.identity import check_admin
from bridle.http.state import http_state, json_response
from bridle.serving.policies import PolicyRegistry

router = APIRouter()


@router.get("/v1/policies", summary="List the policies in force (admins)")
async def policies(request: Request) -> Response:
    check_admin(request)
    return json_response(_shown(http_state(request).policies))


@router.post("/v1/policies/reload", summary="Read the file of policies again (admins)")
async def reload(request: Request) -> Response:
    """Reload the policy file. New requests use the new policies; running requests keep their policies. An invalid file
    changes nothing."""
    check_admin(request)
    book = http_state(request).policies
    await asyncio.to_thread(book.reload)
    return json_response(_shown(book))


def _shown(book: PolicyRegistry) -> dict[str, Any]:
    current = book.current
    rows = [
        {
            "name": policy.name,
            "version": policy.version,
            "kind": policy.kind,
            "order": policy.order,
            "on_failure": policy.on_failure,
            **{what: list(patterns) for what, patterns in policy.scope.items()},
        }
        for policy in current.policies
    ]
    return {"policies": rows, "header": current.has_header, "loads": book.num_loads, "error": book.error}
