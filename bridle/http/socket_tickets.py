"""`POST /v1/websocket_tickets`: a ticket with which a client that can send no headers opens one WebSocket."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.http.middleware.identity import identity_of
from bridle.http.state import http_state, json_response
from bridle.serving.tenancy.socket_tickets import TICKET_SECONDS

router = APIRouter()


@router.post("/v1/websocket_tickets", summary="Get a ticket for one WebSocket")
async def issue(request: Request) -> Response:
    """For pages and programs whose WebSockets cannot send a key: connect to `/?ticket=TICKET`. A ticket opens one
    connection, in the name of the user whose key asked for it."""
    ticket = http_state(request).tickets.issue(identity_of(request))
    response = json_response({"object": "websocket_ticket", "ticket": ticket, "expires_in": TICKET_SECONDS})
    response.headers["cache-control"] = "no-store"
    return response
