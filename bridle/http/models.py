"""The model behind a call: found by name, loaded if need be, and held until the call is over."""

from __future__ import annotations

from fastapi import Request

from bridle.http.call import call_of
from bridle.http.sse import run_while_connected
from bridle.http.state import HttpState, http_state
from bridle.service import Lease, LoadedModel, ModelState


async def hold_model(request: Request, name: str | None) -> LoadedModel:
    """The model that a request names (None: the default), which stays loaded until its call ends.

    One that has to be loaded is waited for, at most the server's `load_timeout`; meanwhile the request counts as in
    flight, and a client that leaves ends the wait. Raises `UnknownModel`, `ModelUnavailable`, `Overloaded`, and
    `EngineClosed` while the server shuts down.
    """
    http = http_state(request)
    if http.registry.state_of(name) is ModelState.LOADED:
        lease = await http.registry.acquire(name)
    else:
        http.check_open()
        with http.admission.admit():
            lease = await _load(request, http, name)
    call_of(request.scope).resources.callback(lease.release)
    # One prompt that fits the model is always taken, whatever was loaded when the limit was set.
    http.admission.max_tokens = max(http.admission.max_tokens, lease.model.max_sequence_tokens)
    return lease.model


async def _load(request: Request, http: HttpState, name: str | None) -> Lease:
    leases: list[Lease] = []

    async def acquire() -> None:
        leases.append(await http.registry.acquire(name, http.settings.load_timeout))

    await run_while_connected(request.receive, acquire())
    return leases[0]
