"""Reads the terms of a call from fields that every body has: how urgent it is, and how long its client waits."""

from __future__ import annotations

from typing import Protocol

from fastapi import Request

from bridle.http.transport.call import call_of
from bridle.http.transport.identity import identity_of
from bridle.service.terms import make_terms


class TermsFields(Protocol):
    """A body, or the part of it that has these fields."""

    priority: int | None
    deadline: float | None


def take_terms(body: TermsFields, request: Request) -> None:
    """Set the terms of the call from its body; later work on the call respects them. Raises `InvalidRequest`."""
    call = call_of(request.scope)
    call.terms = make_terms(body.priority, body.deadline, identity_of(request), call.began)
