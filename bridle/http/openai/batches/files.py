"""`/v1/files`: batch files that users upload, and files of answers that the server writes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.multipart import FormPart, read_form
from bridle.http.openai.responses.stored import page_of
from bridle.http.state import http_state, json_response
from bridle.safe_repr import short_repr
from bridle.serving.outputs.file_store import FileStore

router = APIRouter(route_class=BoundedRoute)
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


@router.post("/v1/files", summary="Upload a file of requests for a batch", openapi_extra=_BODY)
async def upload(request: Request) -> Response:
    form = read_form(request.headers.get("content-type", ""), await request.body())
    file = _checked(form)
    store, user = _store(request)
    return json_response(store.create(user, file.filename or "batch.jsonl", "batch", file.content).fields())


@router.get("/v1/files", summary="The files of a user")
async def list_files(request: Request) -> Response:
    store, user = _store(request)
    purpose = request.query_params.get("purpose")
    files = [file.fields() for file in store.of(user) if purpose in (None, file.purpose)]
    return json_response(page_of(files, request.query_params))


@router.get("/v1/files/{file_id}", summary="A file, without its content")
async def read(file_id: str, request: Request) -> Response:
    store, user = _store(request)
    return json_response(store.find(user, file_id).fields())


@router.delete("/v1/files/{file_id}", summary="Forget a file")
async def delete(file_id: str, request: Request) -> Response:
    store, user = _store(request)
    store.delete(user, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


@router.get("/v1/files/{file_id}/content", summary="The content of a file")
async def content(file_id: str, request: Request) -> Response:
    store, user = _store(request)
    headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    return Response(store.find(user, file_id).content, headers=headers, media_type="application/octet-stream")


def _checked(form: dict[str, FormPart]) -> FormPart:
    """Return the batch file from an uploaded form. Raises `InvalidRequest`."""
    for name in form.keys() - {"file", "purpose"}:
        shown = short_repr(name)
        raise UnsupportedFeature(
            f"{shown} is not supported, because the server keeps all files for the same time; leave it out", name[:80]
        )
    if "file" not in form:
        raise InvalidRequest("file is missing; send the lines of the batch in the form field file", "file")
    purpose = form.get("purpose", FormPart(None, b"")).content.decode("utf-8", "replace")
    if purpose != "batch":
        raise InvalidRequest(
            f"purpose: got {short_repr(purpose)}; must be 'batch'. Send other files as parts of messages", "purpose"
        )
    return form["file"]


def _store(request: Request) -> tuple[FileStore, str]:
    """Return the server's file store, and the user of a request."""
    return http_state(request).files, identity_of(request).user
