"""AICI's REST API: upload controllers, tag them, run them. Wire format: AICI's REST description, section by section.

A controller rides on any other route too; this one streams everything a controller says, fork by fork.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from bridle.aici import protocol
from bridle.aici.client import RuntimePool, WasmController
from bridle.engine.client import EventStream
from bridle.errors import BridleError, InvalidRequest, UnsupportedFeature
from bridle.http.call import call_of
from bridle.http.errors import RefusedBody, error_body, json_response, status_of
from bridle.http.generation import reserve
from bridle.http.identity import identity_of
from bridle.http.json_body import BoundedRoute
from bridle.http.run_shape import RunShaper, initial_run
from bridle.http.sse import SseResponse, SseWriter, run_while_connected
from bridle.http.state import http_state
from bridle.outputs import Event, Finished, TokenEvent
from bridle.sampling import SamplingParams
from bridle.service import LoadedModel, build_request, tokenize

MAX_MODULE_BYTES = 128 << 20
_SEED = 42

router = APIRouter(route_class=BoundedRoute)


class RunBody(BaseModel):
    """`controller` is a module id, a tag, a `gh:` name, or `none` for plain generation."""

    model_config = ConfigDict(strict=True)

    controller: Annotated[str, Field(min_length=1, max_length=200)]
    controller_arg: Any
    prompt: str = ""
    model: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None

    def sampling(self) -> SamplingParams:
        """Greedy unless told otherwise; a fixed seed, so that a run can be repeated."""
        if self.temperature == 0 and self.top_p != 1:
            raise InvalidRequest(f"top_p is {self.top_p}; must be 1 when temperature is 0", "top_p")
        if self.temperature == 0 and self.top_k != -1:
            raise InvalidRequest(f"top_k is {self.top_k}; must be -1 when temperature is 0", "top_k")
        plain = self.controller == "none"
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            seed=_SEED,
            ignore_eos=not plain,
        )

    def argument(self) -> str:
        """What the controller is started with: a string as it is, anything else as JSON text."""
        given = self.controller_arg
        return given if isinstance(given, str) else msgspec.json.encode(given).decode()


class TagsBody(BaseModel):
    """Let `tags` point at an uploaded module."""

    model_config = ConfigDict(strict=True)

    module_id: str
    tags: list[str]


@router.post("/v1/controllers", summary="Upload a controller (raw Wasm bytes)")
async def upload(request: Request) -> Response:
    wasm = await _read_module(request)
    message = protocol.MkModule(binary=base64.b64encode(wasm).decode(), auth=_auth(request))
    return await _side_call(request, message, protocol.ModuleData)


@router.get("/v1/controllers/tags", summary="List the tags of controllers")
async def get_tags(request: Request) -> Response:
    return await _side_call(request, protocol.GetTags(auth=_auth(request)), protocol.TagsData)


@router.post("/v1/controllers/tags", summary="Tag a controller")
async def set_tags(body: TagsBody, request: Request) -> Response:
    message = protocol.SetTags(module_id=body.module_id, tags=body.tags, auth=_auth(request))
    return await _side_call(request, message, protocol.TagsData)


@router.post("/v1/run", summary="Run a controller")
async def run(body: RunBody, request: Request) -> Response:
    http, call = http_state(request), call_of(request.scope)
    try:
        model = http.registry.resolve(body.model)
        ticket = reserve(http, call, model, 1, 1)
        engine_request = await _engine_request(body, request, model)
        ticket.charge(len(engine_request.prompt))
        stream = model.client.submit(engine_request)
        call.resources.callback(stream.cancel)
        running = _Run(stream, RunShaper(engine_request))
        await run_while_connected(request.receive, running.begin())
    except BridleError as error:
        call.error = error
        return _error(error)

    async def produce(writer: SseWriter) -> None:
        await writer.send(initial_run(str(uuid.uuid4()), model.name))
        async for events, item in running.items():
            if any(isinstance(event, TokenEvent) for event in events):
                call.note_tokens()
            await writer.send(item)
        call.usage = running.shaper.collector.output.usage
        await writer.done()

    return SseResponse(produce, http.settings)


class _Run:
    """A submitted request whose first events are awaited before the response begins, so that a controller that
    cannot be had is told by the status code."""

    def __init__(self, stream: EventStream, shaper: RunShaper) -> None:
        self.shaper = shaper
        self._batches = aiter(stream)
        self._first: list[Event] = []

    async def begin(self) -> None:
        """Wait for the first events; raises if the request was at fault."""
        self._first = await anext(self._batches)
        for event in self._first:
            if isinstance(event, Finished) and isinstance(event.error, InvalidRequest):
                raise event.error

    async def items(self) -> AsyncIterator[tuple[list[Event], dict[str, Any]]]:
        """Each batch of events with its `run` item."""
        yield self._first, self.shaper.take(self._first)
        async for events in self._batches:
            yield events, self.shaper.take(events)


async def _engine_request(body: RunBody, request: Request, model: LoadedModel) -> Any:
    call, settings = call_of(request.scope), http_state(request).settings
    controller = None
    prompt = body.prompt
    if body.controller == "none":
        prompt = body.controller_arg if isinstance(body.controller_arg, str) else body.prompt
    else:
        control_of(model)
        controller = WasmController(body.controller, body.argument(), protocol_auth(request))
    tokens = await tokenize(model, prompt) if prompt else _empty_prompt(model)
    return build_request(
        model,
        tokens,
        body.sampling(),
        request_id=call.id,
        controller=controller,
        timeout=settings.request_timeout,
        tenant=identity_of(request).user,
    )


def _empty_prompt(model: LoadedModel) -> tuple[int, ...]:
    """The start token; a model without one starts from a space, like the original."""
    tokenizer = model.tokenizer
    return tuple(tokenizer.encode("")) or (
        (tokenizer.bos_token_id,) if tokenizer.bos_token_id is not None else tuple(tokenizer.encode(" "))
    )


def control_of(model: LoadedModel) -> RuntimePool:
    """The control runtime of a model; raises `UnsupportedFeature` if it has none."""
    if model.control is None:
        raise UnsupportedFeature(f"{model.name!r} is served without a control runtime", "controller")
    return model.control


def protocol_auth(request: Request) -> protocol.Auth:
    """Who asks, in the runtime's words."""
    identity = identity_of(request)
    return protocol.Auth(identity.user, identity.is_admin)


def _auth(request: Request) -> dict[str, Any]:
    return dict(msgspec.to_builtins(protocol_auth(request)))


async def _side_call(request: Request, message: protocol.Message, data_type: Any) -> Response:
    call = call_of(request.scope)
    try:
        control = control_of(http_state(request).registry.resolve(None))
        data = await asyncio.to_thread(control.call, message, data_type)
    except BridleError as error:
        call.error = error
        return _error(error, 501 if isinstance(error, UnsupportedFeature) else 400)
    return json_response(msgspec.to_builtins(data))


async def _read_module(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_MODULE_BYTES:
            error = InvalidRequest(f"the module has more than {MAX_MODULE_BYTES} bytes")
            raise RefusedBody(413, error)
        chunks.append(chunk)
    return b"".join(chunks)


def _error(error: BridleError, status: int | None = None) -> Response:
    """OpenAI's shape, with the message also where the original's client looks for it."""
    if isinstance(error, UnsupportedFeature):
        status = 501
    return json_response({"message": str(error), **error_body(error)}, status or status_of(error)[0])
