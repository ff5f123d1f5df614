"""From text to messages, for clients: lenient, because servers of the original protocol deviate from it.

Unknown types and fields are skipped, a bare object stands for a list of one, infinite log-probabilities are taken as
they are.
"""

from __future__ import annotations

import json
from typing import Any

from bridle.errors import ProtocolError
from bridle.lmtp.messages import Answer, Event, Failure, Msg, Token


def decode_answers(message: str) -> list[Answer]:
    """Read one message of any server; empty for a type that is not known. Raises `ProtocolError` if its payload is no
    JSON."""
    kind, _, text = message.partition(" ")
    if kind not in ("TOKEN", "MSG", "EVENT"):
        return []
    try:
        bodies = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the payload of {kind} is not JSON: {error}") from None
    given = bodies if isinstance(bodies, list) else [bodies]
    read = {"TOKEN": _read_token, "MSG": _read_msg, "EVENT": _read_event}[kind]
    answers = (read(body) for body in given if isinstance(body, dict))
    return [answer for answer in answers if answer is not None]


def _read_token(body: dict[str, Any]) -> Answer | None:
    stream_id = body.get("stream_id")
    if isinstance(stream_id, bool) or not isinstance(stream_id, (int, str)):
        return None
    if body.get("error") is not None:
        return Failure(stream_id=stream_id, error=str(body["error"]), **_known(body, _FAILURE_EXTRAS))
    if "token" not in body:
        return None
    top = body.get("top_logprobs")
    if isinstance(top, dict):
        top = {int(token): value for token, value in top.items() if token.lstrip("-").isdecimal()}
    return Token(stream_id=stream_id, token=body["token"], top_logprobs=top, **_known(body, _TOKEN_EXTRAS))


def _read_msg(body: dict[str, Any]) -> Answer:
    return Msg(stream_id=body.get("stream_id"), **_known(body, _MSG_FIELDS))


def _read_event(body: dict[str, Any]) -> Answer | None:
    event = body.pop("event", None)
    if not isinstance(event, str):
        return None
    return Event(event=event, stream_id=body.pop("stream_id", None), position=body.pop("position", None), data=body)


def _known(body: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: body[name] for name in names if body.get(name) is not None}


_FAILURE_EXTRAS = ("code", "retryable", "retry_after", "param", "position")
_TOKEN_EXTRAS = ("logprob", "finish_reason", "text", "position", "branch", "usage")
_MSG_FIELDS = ("model_info", "error", "code", "lmtp", "buffer", "num_tokens")
