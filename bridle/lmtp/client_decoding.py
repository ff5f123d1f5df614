"""Decodes a server's messages, for clients. Decoding is lenient, because original servers deviate from the protocol.

Unknown message types and fields are skipped. A single object counts as a list of one object. The decoder accepts
several messages in a frame, white space and line breaks around JSON, infinite log-probabilities, and ids written as
`7.0` or as text.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from bridle.errors import ProtocolError
from bridle.lmtp.messages import Answer, EventMessage, Failure, Msg, Token

_TYPE = re.compile(r"\s*([A-Z][A-Z_]{0,31})[ \t\r\n]\s*")
_INTEGER = re.compile(r"-?\d{1,18}")
_json = json.JSONDecoder()


def decode_answers(message: str) -> list[Answer]:
    """Decode one frame of any server. The result is empty for an unknown message type. Raises `ProtocolError` if the
    payload is not JSON."""
    answers: list[Answer] = []
    at, end = 0, len(message.rstrip())
    while at < end:
        head = _TYPE.match(message, at)
        if head is None:
            return answers
        try:
            bodies, at = _json.raw_decode(message, head.end())
        except (ValueError, RecursionError) as error:
            if head[1] not in _READERS or answers:
                return answers
            raise ProtocolError(f"the payload of the server's message {head[1]} is not JSON: {error}") from None
        read = _READERS.get(head[1])
        if read is not None:
            given = bodies if isinstance(bodies, list) else [bodies]
            found = (read(body) for body in given if isinstance(body, dict))
            answers += [answer for answer in found if answer is not None]
    return answers


def _read_token(body: dict[str, Any]) -> Answer | None:
    stream_id = body.get("stream_id")
    if isinstance(stream_id, bool) or not isinstance(stream_id, (int, str)):
        return None
    if body.get("error") is not None:
        return Failure(stream_id=stream_id, error=str(body["error"]), **_known(body, _FAILURE_EXTRAS))
    if "token" not in body:
        return None
    body["logprob"] = _number(body.get("logprob"))
    top = body.get("top_logprobs")
    if isinstance(top, dict):
        pairs = ((_integer(token), _number(value)) for token, value in top.items())
        top = {token: value for token, value in pairs if token is not None and value is not None}
    return Token(stream_id=stream_id, token=_integer(body["token"]), top_logprobs=top, **_known(body, _TOKEN_EXTRAS))


def _integer(value: object) -> int | None:
    """Return an id, which may be written as `7.0` or `"7"`; None for any other value."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    """Return a log-probability, which may be minus infinity; None for NaN and for values that are no numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return value


def _read_msg(body: dict[str, Any]) -> Answer:
    return Msg(stream_id=body.get("stream_id"), **_known(body, _MSG_FIELDS))


def _read_event(body: dict[str, Any]) -> Answer | None:
    event = body.pop("event", None)
    if not isinstance(event, str):
        return None
    return EventMessage(
        event=event, stream_id=body.pop("stream_id", None), position=body.pop("position", None), data=body
    )


def _known(body: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: body[name] for name in names if body.get(name) is not None}


_FAILURE_EXTRAS = ("code", "retryable", "retry_after", "param", "position")
_TOKEN_EXTRAS = ("logprob", "finish_reason", "text", "position", "branch", "usage", "seed")
_MSG_FIELDS = ("model_info", "error", "code", "lmtp", "buffer", "num_tokens", "tool_result")
_READERS = {"TOKEN": _read_token, "MSG": _read_msg, "EVENT": _read_event}
