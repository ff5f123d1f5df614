"""A client's answers to tool calls: one rule for every API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bridle.controller_tools import ToolExecutor
from bridle.controller_tools.functions import as_text
from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr
from bridle.serving.models.loading import LoadedModel


def desks_of(models: Iterable[LoadedModel]) -> list[ToolExecutor]:
    """Return the tool executors of all loaded models; usually they share one."""
    found = {id(model.tools): model.tools for model in models if model.tools is not None}
    return list(found.values())


def answer_call(models: Iterable[LoadedModel], user: str, call_id: str, result: Any, error: str | None) -> None:
    """End a call of this user with a result or an error message. Raises `InvalidRequest` if no such call waits."""
    if error is not None and result is not None:
        raise InvalidRequest("both result and error were given; a call has one answer", "error")
    text = "" if error is not None else as_text(result)
    desk = next((desk for desk in desks_of(models) if desk.waits_for(call_id, user)), None)
    if desk is None:
        raise InvalidRequest(f"no call {short_repr(call_id)} waits for an answer of this user's", "call_id")
    desk.answer(call_id, user, text, error)
