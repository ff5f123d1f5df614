"""Routes of Ollama's API that download and delete models, for admins: `/api/pull` and `/api/delete`.

Both routes accept the models that `bridle pull` lists. Routes to copy, create or upload a model refuse every request,
with a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle import errors
from bridle.http.errors import RefusedBody
from bridle.http.middleware.identity import check_admin
from bridle.http.middleware.request_context import call_of, run_while_connected
from bridle.http.ollama.bodies import OllamaRoute, described, read_body, served_name
from bridle.http.ollama.ndjson import NdjsonResponse, Row, send_rows
from bridle.http.ollama.schemas import NameBody
from bridle.http.sse import SseWriter
from bridle.http.state import HttpState, http_state, json_response
from bridle.model.library import LibraryEntry, find_entry, library_entries, pull_entry, remove_entry
from bridle.serving import ModelRegistry

_GLANCE = 0.25  # seconds between two progress objects of a pull
_REFUSED = {
    "copy": "models have no copies here; `bridle serve --model-alias NAME=MODEL` gives one a further name",
    "create": "models are not made here; serve a folder or a GGUF file, and send system and options with each request",
    "push": "nothing is uploaded from here",
    "blobs/{digest}": "files are not uploaded here; put them into a folder and serve it",
}

router = APIRouter(route_class=OllamaRoute)


@router.post("/api/pull", summary="Download a model (Ollama's API, admins)", openapi_extra=described(NameBody))
async def pull(request: Request) -> Response:
    body, http = await read_body(NameBody, request), http_state(request)
    name = body.required()
    _check_may_manage(request, http)
    entry = find_entry(name)
    if entry is None and not _is_served(http.registry, name):
        known = ", ".join(each.name for each in library_entries())
        raise errors.UnknownModel(f"model {name[:100]!r} not found; models that can be pulled: {known}", "model")
    pulling = _Pulling(http, entry)
    if body.stream is not False:
        return NdjsonResponse(pulling.stream, call_of(request.scope), http.settings)
    await run_while_connected(request.receive, pulling.finish())
    return json_response({"status": "success"})


def _is_served(registry: ModelRegistry, name: str) -> bool:
    try:
        registry.choose(served_name(registry, name))
    except errors.UnknownModel:
        return False
    return True


@dataclass(slots=True)
class _Pulling:
    """One download of a model; nothing is downloaded if `entry` is None. If the client disconnects, the download ends,
    and the downloaded parts are kept."""

    http: HttpState
    entry: LibraryEntry | None
    _share: float = 0.0
    _is_left: bool = False

    async def stream(self, writer: SseWriter) -> None:
        """Send the progress of the download."""
        await send_rows(writer, {"status": "pulling manifest"})
        async for row in self._rows():
            await send_rows(writer, row)
        await send_rows(writer, {"status": "success"})

    async def finish(self) -> None:
        """Download the model without reporting the progress."""
        async for _ in self._rows():
            pass

    async def _rows(self) -> AsyncIterator[Row]:
        entry = self.entry
        if entry is None:
            return
        if self.http.num_pulls:
            raise errors.Overloaded("another model is being pulled; try again when it is done")
        self.http.num_pulls += 1
        try:
            pulling = asyncio.create_task(asyncio.to_thread(pull_entry, entry, self._report))
            told = -1.0
            while not (await asyncio.wait({pulling}, timeout=_GLANCE))[0]:
                if self._share != told:
                    told = self._share
                    yield self._row(entry)
            await pulling
            yield self._row(entry) | {"completed": entry.download_bytes}
            for status in ("verifying sha256 digest", "writing manifest"):
                yield {"status": status}
        finally:
            self._is_left = True
            self.http.num_pulls -= 1

    def _report(self, stage: str, share: float) -> None:
        """Record the progress of the download. Ends the download if the client has disconnected. Called in the
        download's thread."""
        if self._is_left:
            raise errors.RequestCancelled("the client disconnected")
        self._share = share

    def _row(self, entry: LibraryEntry) -> Row:
        total = entry.download_bytes
        counts = {"total": total, "completed": int(self._share * total)}
        return {"status": f"pulling {entry.sha256[:12]}", "digest": f"sha256:{entry.sha256}", **counts}


@router.delete("/api/delete", summary="Delete a pulled model (Ollama's API, admins)", openapi_extra=described(NameBody))
async def delete(request: Request) -> Response:
    body, http = await read_body(NameBody, request), http_state(request)
    name = body.required()
    _check_may_manage(request, http)
    entry = find_entry(name)
    if entry is None:
        raise errors.UnknownModel(f"model {name[:100]!r} not found among the models that can be deleted", "model")
    await _unload(http.registry, entry)
    if not await asyncio.to_thread(remove_entry, entry):
        raise errors.UnknownModel(f"model {name[:100]!r} not found; it is not on this machine", "model")
    return Response(status_code=200)


async def _unload(registry: ModelRegistry, entry: LibraryEntry) -> None:
    """Unload a model before its files are deleted. Raises `InvalidRequest` for a model that the operator serves."""
    for slot in registry.slots:
        named = slot.name if slot.is_passing or slot.config is None else slot.config.model
        if find_entry(named) is not entry:
            continue
        if not slot.is_passing:
            raise errors.InvalidRequest(
                f"{slot.name} was given on the server's command line, so it cannot be deleted", "model"
            )
        if slot.model is not None:
            await registry.unload(slot.name)


def _check_may_manage(request: Request, http: HttpState) -> None:
    """Raise a 403 error if the client is no admin, or if the operator did not allow pulls."""
    check_admin(request)
    if not http.registry.may_pull:
        reason = "this server pulls and deletes no models; its operator allows it with --allow-pull"
        raise RefusedBody(403, errors.Unauthorized(reason))


def _refusing(path: str, why: str) -> None:
    @router.post(f"/api/{path}", include_in_schema=False)
    async def refuse(request: Request) -> Response:
        raise errors.UnsupportedFeature(f"/api/{path} is not supported: {why}")


for _path, _why in _REFUSED.items():
    _refusing(_path, _why)
