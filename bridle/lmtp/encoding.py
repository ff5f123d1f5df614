"""Encodes messages as text: a type, a space, and JSON. A client sends one object in a message, a server a list of
objects.

A server's JSON is strict: a log-probability of minus infinity becomes a very low number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from bridle.lmtp.messages import KINDS, Answer, EventMessage, Failure, Generate, Msg, Request, Score, Token

#: The maximum length of a message from a server. The original client accepts at most 4 MiB.
MAX_ANSWER_CHARS = 1 << 20
#: The encoding of minus infinity. JSON has no infinities, and LMQL drops continuations below -3e38.
MIN_LOGPROB = -1e9

_to_json = json.JSONEncoder(allow_nan=False).encode


def encode_request(request: Request) -> str:
    """Encode a request. Fields with default values are left out, because original servers may not know them."""
    body = {name: value for name, value in _changed(request) if name != "options"}
    if isinstance(request, Generate):
        body = {**body, **request.options}
    if isinstance(request, (Generate, Score)):
        body["prompt"] = request.prompt
    return f"{KINDS[type(request)]} {_to_json(body)}"


def encode_answers(answers: Iterable[Answer]) -> Iterator[str]:
    """Encode answers in order. Consecutive answers of one type share a message, up to a message size that every client
    accepts."""
    kind, bodies, size = "", list[str](), 0
    for answer in answers:
        body = encode_answer(answer)
        if bodies and (kind != KINDS[type(answer)] or size + len(body) > MAX_ANSWER_CHARS):
            yield f"{kind} [{', '.join(bodies)}]"
            bodies, size = [], 0
        kind = KINDS[type(answer)]
        bodies.append(body)
        size += len(body)
    if bodies:
        yield f"{kind} [{', '.join(bodies)}]"


def encode_answer(answer: Answer) -> str:
    """Return the JSON object of one answer."""
    body = _token_body(answer) if isinstance(answer, Token) else _other_body(answer)
    try:
        return _to_json(body)
    except ValueError:  # an infinity or a NaN
        return _to_json(_finite(body))


def _token_body(token: Token) -> dict[str, Any]:
    body: dict[str, Any] = {
        "token": token.token,
        "stream_id": token.stream_id,
        "logprob": token.logprob,
        "finish_reason": token.finish_reason,
    }
    if token.top_logprobs is not None:
        body["top_logprobs"] = token.top_logprobs
    if token.text is not None:
        body["text"] = token.text
    if token.position is not None:
        body["position"] = token.position
    if token.branch:
        body["branch"] = token.branch
    if token.usage is not None:
        body["usage"] = token.usage
    if token.seed is not None:
        body["seed"] = token.seed
    return body


def _other_body(answer: Failure | Msg | EventMessage) -> dict[str, Any]:
    body = {"stream_id": answer.stream_id, **dict(_changed(answer))}
    if isinstance(answer, EventMessage):
        body |= body.pop("data", {})
    return body


def _changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of fields that differ from their defaults, in order."""
    for each in fields(value):
        content = getattr(value, each.name)
        default = each.default_factory() if callable(each.default_factory) else each.default
        if content != default or isinstance(content, bool) is not isinstance(default, bool):
            yield each.name, content


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return MIN_LOGPROB
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
