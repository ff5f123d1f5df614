"""Tools that users call themselves, without a controller: the tools with `direct = true` in the operator's file.

A chat client offers the direct tools to its model, shows each call to its user, and gets the result from this module.
This module also passes clients' results to calls of controllers, by the same rules in every API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from bridle.controller_tools import Tool, ToolCallContext, ToolExecutor, ToolSession
from bridle.controller_tools.functions import as_text
from bridle.controller_tools.session import entry_of
from bridle.errors import InvalidRequest, ToolFailed
from bridle.safe_repr import short_repr
from bridle.serving.models.loading import LoadedModel
from bridle.serving.tenancy.keys import Identity


def desks_of(models: Iterable[LoadedModel]) -> list[ToolExecutor]:
    """Return the tool executors of all loaded models. Usually all models share one executor."""
    found = {id(model.tools): model.tools for model in models if model.tools is not None}
    return list(found.values())


def answer_call(models: Iterable[LoadedModel], user: str, call_id: str, result: Any, error: str | None) -> None:
    """End a call that waits for this user, with a result or an error message. Raises `InvalidRequest` if no call with
    this id waits."""
    if error is not None and result is not None:
        raise InvalidRequest("the body has both result and error; send one of them", "error")
    text = "" if error is not None else as_text(result)
    desk = next((desk for desk in desks_of(models) if desk.waits_for(call_id, user)), None)
    if desk is None:
        raise InvalidRequest(f"no tool call {short_repr(call_id)} of this user waits for an answer", "call_id")
    desk.answer(call_id, user, text, error)


async def list_tools(models: Iterable[LoadedModel], user: Identity) -> list[dict[str, Any]]:
    """Return a row for each tool that this user may call: its name, its description, and the JSON schema `parameters`.
    For a tool server that does not start, there is a row with its name and an `error`."""
    found = [
        (desk, name, tool)
        for desk in desks_of(models)
        for name, tool in desk.direct_for(user.user, user.is_admin).items()
    ]
    rows = await asyncio.gather(*(_rows(*each) for each in found))
    return [row for each in rows for row in each]


async def call_tool(
    models: Iterable[LoadedModel], user: Identity, name: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Call a tool. Returns a row with the `result` of the call or an `error`. Cancelling this coroutine ends the
    call."""
    desks = [(desk, tuple(desk.direct_for(user.user, user.is_admin))) for desk in desks_of(models)]
    desk, names = next((each for each in desks if entry_of(name, each[1]) is not None), (None, ()))
    if desk is None:
        known = ", ".join(name for _, names in desks for name in names) or "none"
        return {"error": f"there is no tool {name!r} that you may call; there are {known}"}
    call = ToolSession(desk, names, ToolCallContext(user.user)).call(name, arguments)
    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def wake() -> None:
        loop.call_soon_threadsafe(done.set)

    call.when_done(wake)
    try:
        await done.wait()
    finally:
        call.cancel()
    return {"result": call.text} if call.error is None else {"error": call.error}


async def _rows(desk: ToolExecutor, name: str, tool: Tool) -> list[dict[str, Any]]:
    """Return the rows for one entry of the operator's file of tools."""
    try:
        offers = await asyncio.wrap_future(desk.run(tool.offers()))
    except ToolFailed as error:
        return [{"name": name, "error": str(error)}]
    return [offer._asdict() for offer in offers]
