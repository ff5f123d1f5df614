"""`POST /invocations`: the one route of hosted endpoints, which takes the body of any of the generating routes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.api_route import checked_body
from bridle.http.openai.chat import chat_completions
from bridle.http.openai.completions import completions
from bridle.http.openai.schemas import ChatBody, CompletionBody
from bridle.http.tgi.errors import TgiRoute
from bridle.http.tgi.routes import compat
from bridle.http.tgi.schemas import base_name
from bridle.serving.lora.adapter_registry import PLACEHOLDER

router = APIRouter(route_class=TgiRoute)


_ANY_BODY = {
    "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("GenerateBody", "ChatBody", "CompletionBody")]
}
_DESCRIBED = {"requestBody": {"required": True, "content": {"application/json": {"schema": _ANY_BODY}}}}


@router.post(
    "/invocations", summary="A text, a conversation or a completion, told by its fields", openapi_extra=_DESCRIBED
)
async def invocations(request: Request) -> Response:
    data = await request.json()
    fields = data if isinstance(data, dict) else {}
    if isinstance(name := fields.get("model"), str):
        fields["model"] = base_name(name)
    if "inputs" in fields:
        return await compat(fields, request)
    fields["model"] = fields.get("model") or PLACEHOLDER  # these clients mean the default, or name none
    if "messages" in fields:
        return await chat_completions(checked_body(ChatBody, fields), request)
    if "prompt" in fields:
        return await completions(checked_body(CompletionBody, fields), request)
    raise InvalidRequest("the body has none of 'inputs', 'messages' and 'prompt'; it must have one of them")
