"""Gets the model of a call, and the adapter over it: by name, loaded if need be, and held until the call is over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from fastapi import Request

from bridle.http.state import HttpState, http_state
from bridle.http.transport.call import call_of
from bridle.http.transport.sse import run_while_connected
from bridle.http.transport.waiting import wait_for
from bridle.service import AdapterInfo, Lease, LoadedModel, ModelState

T = TypeVar("T")


class Served(NamedTuple):
    """What answers a request: a model, and the name of an adapter over it, or None."""

    model: LoadedModel
    adapter: str | None


async def hold(request: Request, name: str | None, adapter: str | None = None) -> Served:
    """Return the model and the adapter that a request names, both loaded; `name` may be an adapter's, too.

    Loading may take at most the server's `load_timeout` for each. Meanwhile the request counts as in flight; the wait
    ends if its client leaves. Raises `UnknownModel`, `UnknownAdapter`, `AdapterRefused`, `ModelUnavailable`,
    `Overloaded`, and `EngineClosed` while the server shuts down.
    """
    http = http_state(request)
    chosen = http.registry.choose(name, adapter)
    model = await _hold(request, http, chosen.model)
    adapters = http.registry.adapters

    def fetch() -> Awaitable[str | None]:
        return adapters.fetch(model, chosen.adapter, http.settings.load_timeout)

    is_ready = adapters.is_ready(model, chosen.adapter)
    found = await (fetch() if is_ready else _wait(request, http, fetch))
    call_of(request.scope).adapter = found
    return Served(model, found)


async def hold_model(request: Request, name: str | None) -> LoadedModel:
    """Return the model that a request names (None: the default), which stays loaded until the call ends; for an
    adapter's name, the adapter's model. Waits and raises as `hold` does."""
    http = http_state(request)
    return await _hold(request, http, http.registry.choose(name).model)


async def load_adapter(
    request: Request, model: LoadedModel, name: str, source: str, revision: str | None = None
) -> AdapterInfo:
    """Load a new adapter of a model. Raises the error of one that cannot be used."""
    http = http_state(request)
    http.check_open()
    return await run_while_connected(request.receive, http.registry.adapters.load(model, name, source, revision))


async def _hold(request: Request, http: HttpState, name: str | None) -> LoadedModel:
    def acquire() -> Awaitable[Lease]:
        return http.registry.acquire(name, http.settings.load_timeout)

    is_loaded = http.registry.state_of(name) is ModelState.LOADED
    lease = await (acquire() if is_loaded else _wait(request, http, acquire))
    call_of(request.scope).resources.callback(lease.release)
    # One prompt that fits the model must always be accepted, whatever was loaded when the limit was set.
    http.admission.max_tokens = max(http.admission.max_tokens, lease.model.max_sequence_tokens)
    return lease.model


async def _wait(request: Request, http: HttpState, load: Callable[[], Awaitable[T]]) -> T:
    """Wait until the load is done, or until the client leaves."""
    http.check_open()
    with http.admission.admit():
        return await wait_for(call_of(request.scope), "its model was loaded", load())
