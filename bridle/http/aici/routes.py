"""AICI's REST API: upload controllers, tag them, run them. Requests and responses follow AICI's description of its REST
API.

All routes that generate text accept controllers, but only `/v1/run` streams all output of a controller, for each fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from bridle import errors
from bridle.chat.chat_request import limited, render_prompt
from bridle.chat.conversation import Conversation, continued
from bridle.controllers.plugins import is_class
from bridle.engine.multimodal.multimodal_inputs import NO_SIGHTS, MultiModalInputs
from bridle.http.aici.shapes import RunShaper, initial_run
from bridle.http.errors import RefusedBody, error_body, retry_headers, status_of
from bridle.http.fields import ControllerFields, Fields, InnerFields
from bridle.http.middleware.content_coding import check_plain
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import call_of, run_while_connected
from bridle.http.openai.sampling_fields import derived_fields
from bridle.http.openai.schemas import MAX_MESSAGES, MAX_TOOLS, JsonObjects, objects
from bridle.http.sse import SseResponse, SseWriter
from bridle.http.state import HttpState, http_state, json_response, serving_of
from bridle.outputs import Event, Finished
from bridle.safe_repr import public_text
from bridle.sampling import SamplingParams, fields_on
from bridle.serving import LoadedModel, list_tags, tag_module, upload_module
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests.sampling_defaults import filled
from bridle.serving.requests.steering import (
    MAX_NAME_CHARS,
    NO_CONTROLLER,
    Controllers,
    Steering,
    auth_of,
    control_of,
    ignores_eos,
    is_controlled,
)
from bridle.tokenizer.chat_settings import ToolPrompt
from bridle.tokenizer.start_tokens import start_tokens

if TYPE_CHECKING:
    from bridle.aici.client import RuntimePool

MAX_MODULE_BYTES = 128 << 20
MAX_TAGS = 64
_WASM = b"\0asm"  # the first bytes of a Wasm module
_SEED = 42
#: Errors that set the HTTP status code if they occur before the stream begins.
_REFUSALS = (errors.InvalidRequest, errors.ControllerUnavailable, errors.Overloaded)

router = APIRouter(route_class=BoundedRoute)


#: Sampling fields that the body does not derive: it has its own rule for them, or a stream of forks does not report
#: them.
_NOT_DERIVED = ("n", "logprobs", "prompt_logprobs", "seed", "ignore_eos", "include_stop_str_in_output")
if TYPE_CHECKING:
    _Derived = Fields
else:
    _Derived = derived_fields("openai", without=_NOT_DERIVED)


class RunBody(ControllerFields, _Derived):
    """Body of `/v1/run`. `controller` is a module id, a tag, a `gh:` reference, or `none` for plain generation, which
    may have a `constraint`. A body with a list of `controllers` may leave `controller` out. Instead of a `prompt`, a
    body may have `messages`, which the model's chat template renders. Further sampling fields are derived from
    `SamplingParams`."""

    controller: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    controller_arg: Any
    prompt: str = ""
    messages: Annotated[JsonObjects | None, objects("messages", MAX_MESSAGES)] = None
    tools: Annotated[JsonObjects | None, objects("tools", MAX_TOOLS)] = None
    tool_prompt: ToolPrompt | None = None
    thinking_budget: int | None = None
    thinking_budget_message: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    model: str | None = None
    adapter: str | None = None
    priority: int | None = None
    deadline: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    constraint: dict[str, Any] | None = None
    trace: bool | str | None = None

    @model_validator(mode="before")
    @classmethod
    def _list_alone(cls, body: Any) -> Any:
        """Set a missing `controller` to `none` if the body has a list of `controllers`."""
        if isinstance(body, dict) and body.get("controllers") and "controller" not in body:
            return {"controller": NO_CONTROLLER, "controller_arg": None} | body
        return body

    def named(self) -> Controllers:
        """Return the controllers of the request. An argument of null counts as an argument. With controller `none`, the
        argument is the prompt."""
        if self.controller == NO_CONTROLLER:
            return Controllers(controllers=self.controllers, client_tools=self.client_tools)
        is_said = self.controller_arg is not None or is_class(self.controller)
        argument = self.controller_arg if is_said else "null"
        return Controllers(self.controller, argument, self.controllers, self.client_tools)

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters. By default, sampling is greedy with a fixed seed, so that a run can be
        repeated."""
        if not self.temperature and self.top_p not in (None, 1):
            raise errors.InvalidRequest(f"top_p is {self.top_p}; must be 1 when temperature is 0", "top_p")
        if not self.temperature and self.top_k not in (None, -1):
            raise errors.InvalidRequest(f"top_k is {self.top_k}; must be -1 when temperature is 0", "top_k")
        if self.top_k is not None and self.top_k != -1 and self.top_k < 1:
            raise errors.InvalidRequest(f"top_k is {self.top_k}; must be -1 (all) or at least 1", "top_k")
        usual = {"max_tokens": None, "temperature": 0.0}
        return SamplingParams(**usual | self._given(), seed=_SEED, ignore_eos=ignores_eos(self.named(), None))

    def conversation(self) -> Conversation | None:
        """Return the conversation in `messages`; None without this field. Raises `InvalidRequest`."""
        if self.messages is None:
            if self.tools:
                raise errors.InvalidRequest(
                    "the body has tools but no messages; send messages, or leave tools out", "tools"
                )
            if self.thinking_budget is not None or self.thinking_budget_message is not None:
                raise errors.InvalidRequest(
                    "the body has thinking_budget but no messages; send messages, or leave thinking_budget out",
                    "thinking_budget",
                )
            return None
        if self.prompt:
            raise errors.InvalidRequest("the body has both prompt and messages; send only one of them", "messages")
        messages, begun = continued(self.messages, self.continue_final_message, self.add_generation_prompt)
        return Conversation(
            messages,
            self.tools,
            thinking_budget=self.thinking_budget,
            thinking_budget_message=self.thinking_budget_message,
            variables=self.chat_template_kwargs or {},
            prefill=begun,
            tool_prompt=self.tool_prompt,
        )

    def filled(self, sampling: SamplingParams, model: LoadedModel) -> SamplingParams:
        """Return `sampling` with the values that the checkpoint recommends for fields missing in this body."""
        return filled(sampling, model.defaults, self._given())

    def _given(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in fields_on("openai") if name in RunBody.model_fields}
        return {name: value for name, value in given.items() if value is not None}


class TagsBody(InnerFields):
    """Body with the tags to set for an uploaded module."""

    module_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    tags: Annotated[list[str], Field(max_length=MAX_TAGS)]


_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_WASM_BODY = {"requestBody": {"required": True, "content": _BYTES}}


@router.post("/v1/controllers", summary="Upload a controller (raw Wasm bytes)", openapi_extra=_WASM_BODY)
async def upload(request: Request) -> Response:
    _refuse_foreign_page(request)
    return await _with_store(request, lambda control: _upload(request, control))


@router.get("/v1/controllers/tags", summary="List the tags of controllers")
async def get_tags(request: Request) -> Response:
    return await _with_store(
        request, lambda control: asyncio.to_thread(list_tags, control, auth_of(identity_of(request)))
    )


@router.post("/v1/controllers/tags", summary="Tag a controller")
async def set_tags(body: TagsBody, request: Request) -> Response:
    def tag(control: RuntimePool) -> Awaitable[Any]:
        return asyncio.to_thread(tag_module, control, body.module_id, body.tags, auth_of(identity_of(request)))

    return await _with_store(request, tag)


@router.post("/v1/run", summary="Run a controller")
async def run(body: RunBody, request: Request) -> Response:
    try:
        generation = await run_while_connected(request.receive, _begin(body, serving_of(request, body.trace)))
    except errors.BridleError as error:
        call_of(request.scope).error = error
        return _error(error)
    shaper = RunShaper(generation.parts[0])

    async def produce(writer: SseWriter) -> None:
        async def sink(part: SubRequest, events: list[Event]) -> None:
            await writer.send(shaper.run_item(events))

        await writer.send(initial_run(str(uuid.uuid4()), generation.served_name))
        await generation.run(sink, tells_failures=True)
        writer.end()

    return SseResponse(produce, http_state(request).settings)


async def _begin(body: RunBody, serving: RequestLifecycle) -> Generation:
    """Start a run and wait for its first events, so that the HTTP status code can report a missing controller."""
    sampling = body.sampling()
    model = await serving.acquire_model(body.model, body.adapter, priority=body.priority, deadline=body.deadline)
    steering = serving.steering(body.named(), body.constraint, rewind="mark")
    tokens, sights, steering = await _prompt(body, serving, model, steering)
    sampling = body.filled(sampling, model)
    generation = await serving.prepare([tokens], sampling, steering, sights=sights)
    for event in await generation.begin():
        if isinstance(event, Finished) and isinstance(event.error, _REFUSALS):
            raise event.error
    return generation


async def _prompt(
    body: RunBody, serving: RequestLifecycle, model: LoadedModel, steering: Steering
) -> tuple[tuple[int, ...], MultiModalInputs, Steering]:
    """Return the prompt: a conversation rendered by the chat template, a text, or the start token. A conversation may
    also limit the tokens of its reasoning."""
    conversation = body.conversation()
    if conversation is not None:
        made = await render_prompt(serving, conversation)
        return made.tokens, made.sights, await limited(model, conversation, made, steering)
    is_plain = not is_controlled(body.named())
    text = body.controller_arg if is_plain and isinstance(body.controller_arg, str) else body.prompt
    return (await serving.tokens([text]))[0] if text else start_tokens(model.tokenizer), NO_SIGHTS, steering


# -- the store -----------------------------------------------------------------------------------------------


async def _with_store(request: Request, work: Callable[[RuntimePool], Awaitable[Any]]) -> Response:
    """Respond with the result of `work`. As in AICI's original server, every error of the module store has a 4xx
    status."""
    http, call = http_state(request), call_of(request.scope)
    try:
        http.check_open()
        # Do not watch for a disconnect here: the watcher would read the module's bytes, which `_read_module` must get.
        control = control_of(await serving_of(request).acquire_model_for_metadata(request.query_params.get("model")))
        call.resources.enter_context(http.admission.admit(user=identity_of(request).user))
        data = await work(control)
    except (errors.Overloaded, errors.EngineClosed, errors.ControllerUnavailable, errors.ModelUnavailable) as error:
        call.error = error
        return _error(error)
    except errors.BridleError as error:
        call.error = error
        return _error(error, 400)
    return json_response(msgspec.to_builtins(data))


async def _upload(request: Request, control: RuntimePool) -> Any:
    http = http_state(request)
    with _upload_place(http):
        wasm = await _read_module(request, control)
        return await asyncio.to_thread(upload_module, control, wasm, auth_of(identity_of(request)))


@contextlib.contextmanager
def _upload_place(http: HttpState) -> Iterator[None]:
    """Limit the number of concurrent uploads, because an upload may need several times the memory of its module."""
    limit = http.settings.max_uploads
    if http.num_uploads >= limit:
        raise errors.Overloaded(f"{http.num_uploads} controllers are being uploaded; at most {limit} at the same time")
    http.num_uploads += 1
    try:
        yield
    finally:
        http.num_uploads -= 1


async def _read_module(request: Request, control: RuntimePool) -> bytes:
    check_plain(request)
    settings = http_state(request).settings
    limit = min(MAX_MODULE_BYTES, control.config.json_size * 3 * (1 << 18) - 1024)  # sent in base64
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(10 * settings.receive_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
                if not body.startswith(_WASM[: len(body)]):
                    raise errors.InvalidRequest(
                        f"the body begins with {bytes(body[:4])!r}; a WebAssembly module begins with a zero byte and "
                        "asm"
                    )
    except TimeoutError:
        error = errors.InvalidRequest(f"the module did not arrive within {10 * settings.receive_timeout:g} seconds")
        raise RefusedBody(408, error) from None
    if not body:
        raise errors.InvalidRequest("the body is empty; send the bytes of a .wasm file")
    return bytes(body)


def _too_large(limit: int) -> RefusedBody:
    return RefusedBody(413, errors.InvalidRequest(f"the module is too large; at most {limit} bytes are accepted"))


def _refuse_foreign_page(request: Request) -> None:
    """Refuse requests from web pages of another origin. The upload accepts any content type, so it checks the header
    `Origin`. All other routes accept only JSON, which browsers send to another origin only after a CORS preflight.
    Programs other than browsers do not send this header."""
    origin, allowed = request.headers.get("origin"), http_state(request).settings.cors_origins
    if origin is None or "*" in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise RefusedBody(403, errors.Unauthorized(f"pages of {origin[:80]!r} may not upload; see --cors-origin"))


def _error(error: errors.BridleError, status: int | None = None) -> Response:
    """Return an error in OpenAI's format, with the message also in the field that AICI's client reads."""
    if isinstance(error, errors.UnsupportedFeature):
        status = 501
    elif isinstance(error, errors.ControllerUnavailable):
        status = 500
    headers = retry_headers(error)
    return json_response({"message": public_text(error), **error_body(error)}, status or status_of(error)[0], headers)
