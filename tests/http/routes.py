"""The APIs that generate text: the request body of each, and the place of the text in the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx

from bridle.http.aici.routes import RunBody
from bridle.http.anthropic.schemas import MessagesBody
from bridle.http.fields import Fields
from bridle.http.openai.responses.schemas import ResponsesBody
from bridle.http.openai.schemas import ChatBody, CompletionBody
from bridle.http.tgi.schemas import Parameters

MESSAGES = [{"role": "user", "content": "Hi"}]
#: Each route that makes text, its smallest body, and where its own fields are.
ROUTES: dict[str, tuple[dict[str, Any], type[Fields]]] = {
    "/v1/completions": ({"prompt": "Say", "max_tokens": 1}, CompletionBody),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 1}, ChatBody),
    "/v1/responses": ({"input": "Hi", "max_output_tokens": 1}, ResponsesBody),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 1}, MessagesBody),
    "/generate": ({"max_new_tokens": 1}, Parameters),
    "/v1/run": ({"controller": "none", "controller_arg": "", "max_tokens": 1}, RunBody),
}


def post(client: httpx.Client, route: str, fields: dict[str, Any], **headers: str) -> httpx.Response:
    """Post a request body with these fields at their places on the route."""
    body = ROUTES[route][0] | fields
    if route == "/generate":
        body = {"inputs": "Say", "parameters": body}
    return client.post(route, json=body, headers=headers)


def text_of(answer: httpx.Response) -> str:
    """Return the generated text of an answer of any route."""
    assert answer.status_code == 200, answer.text
    if answer.request.url.path == "/v1/run":
        lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(fork.get("text", "") for line in lines for fork in line.get("forks", ()))
    body: Any = answer.json()
    match answer.request.url.path:
        case "/v1/completions":
            return str(body["choices"][0]["text"])
        case "/v1/chat/completions":
            return str(body["choices"][0]["message"]["content"])
        case "/v1/responses":
            return str(body["output"][0]["content"][0]["text"])
        case "/v1/messages":
            return str(body["content"][0]["text"])
        case _:
            return str(body["generated_text"])


def of_eight(route: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with a limit of 8 tokens, under its name on the route."""
    (name,) = [name for name in ROUTES[route][0] if name.startswith("max_")]
    return {name: 8} | fields
