"""Decodes a client's messages, for servers. Every text becomes a request, or a `Rejected` with the error.

This module checks only the presence and type of each field. `server.requests` has the checks that depend on a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args

from bridle.errors import BridleError, InvalidRequest, ProtocolError
from bridle.lmtp.messages import KINDS, Buffer, Generate, Prompt, Rejected, Request
from bridle.safe_repr import short_repr

_MAX_ID_CHARS = 200
_MAX_NAME_CHARS = 200
_MAX_KIND_CHARS = 80


def decode_request(message: str, loads: Callable[[str], Any] = json.loads) -> Request | Rejected:
    """Decode one message. `loads` is the JSON parser. The parser may raise `ValueError`, or `InvalidRequest` for JSON
    that is too large."""
    kind, _, text = message.partition(" ")
    begun = kind[:_MAX_KIND_CHARS]
    if kind not in _KINDS and (not text or not kind.isidentifier()):
        return Rejected(
            begun, None, ProtocolError(f"{begun!r} is not a message; a message is TYPE, a space, and a JSON object")
        )
    try:
        body = loads(text)
    except InvalidRequest as error:
        return Rejected(begun, None, error)
    except (ValueError, RecursionError) as error:
        return Rejected(begun, None, ProtocolError(f"the payload of {begun} is not JSON: {error}"))
    if not isinstance(body, dict):
        return Rejected(begun, None, ProtocolError(f"the payload of {begun} must be one JSON object"))
    stream_id = body.get("stream_id")
    if not _is_stream_id(stream_id):
        return Rejected(begun, None, _bad_stream_id(body))
    if kind not in _KINDS:
        return Rejected(begun, stream_id, ProtocolError(f"Unknown command: {begun}"))
    try:
        return _read(_KINDS[kind], body)
    except BridleError as error:
        return Rejected(kind, stream_id, error)


def _is_stream_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_ID_CHARS
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _bad_stream_id(body: dict[str, Any]) -> BridleError:
    if body.get("stream_id") is None:
        return ProtocolError("'stream_id' is missing")
    return ProtocolError(f"stream_id must be an integer or a string of at most {_MAX_ID_CHARS} characters")


def _read(kind: type[Request], body: dict[str, Any]) -> Request:
    """Read a request of type `kind` from a payload. `_NAMED` or a field's annotation decides how the field is read.
    Null counts as absent. Raises `InvalidRequest`."""
    values: dict[str, Any] = {}
    needs_prompt = kind is not Buffer and "buffer" not in body
    for each in fields(kind):
        name = each.name
        if name == "options":  # the remaining fields of the payload
            continue
        value = body.pop(name, None)
        if value is not None:
            values[name] = _NAMED.get(name, _TYPED.get(str(each.type), _anything))(name, value)
        elif name == "model":
            raise InvalidRequest("'model' is missing; name a model, or 'auto'", name)
        elif (name == "prompt" and needs_prompt) or (each.default is MISSING and each.default_factory is MISSING):
            raise InvalidRequest(f"{name!r} is missing", name)
    if kind is Generate:
        values["options"] = {name: value for name, value in body.items() if value is not None}
    return kind(**values)


# -- fields ----------------------------------------------------------------------------------------------------


def _anything(name: str, value: Any) -> Any:
    return value


def _model(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest("'model' is missing; name a model, or 'auto'", name)
    return value


def _text(name: str, value: Any) -> str:
    if not (isinstance(value, str) and 0 < len(value) <= _MAX_NAME_CHARS):
        raise InvalidRequest(
            f"{name} is {short_repr(value)}; must be a text of 1 to {_MAX_NAME_CHARS} characters", name
        )
    return value


def _adapter(name: str, value: Any) -> str | None:
    """Read the name of an adapter. As on all routes, an empty name means the model without an adapter."""
    return None if value == "" else _text(name, value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {short_repr(value)}; must be an integer", name)
    return value


def _position(name: str, value: Any) -> int:
    if _integer(name, value) < 0:
        raise InvalidRequest(f"position is {value}; must be at least 0", name)
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name} is {short_repr(value)}; must be a number", name)
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {short_repr(value)}; must be true or false", name)
    return value


def _said(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {short_repr(value)}; must be text", name)
    return value


def _rewind(name: str, value: Any) -> str:
    if value not in ("hold", "event"):
        raise InvalidRequest(f"{name} is {short_repr(value)}; must be 'hold' or 'event'", name)
    return str(value)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is {short_repr(value)}; must be an object", name)
    return value


def _list(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(f"{name} is {short_repr(value)}; must be a list", name)
    return tuple(value)


def _prompt(name: str, value: Any) -> Prompt:
    """Read a prompt: text, or token ids. Nulls among the token ids are ignored."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not set(map(type, value)) <= {int, type(None)}:
        raise InvalidRequest(f"{name} must be a list of token ids, or text", name)
    return tuple(value) if None not in value else tuple(token for token in value if token is not None)


def _bias(name: str, value: Any) -> Mapping[int, float]:
    given = _mapping(name, value)
    try:
        return dict(zip(map(int, given), map(float, given.values()), strict=True))
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest("logit_bias must be an object that maps token ids to numbers", name) from None


#: Fields that are not read by their annotation.
_NAMED: Mapping[str, Callable[[str, Any], Any]] = {
    "model": _model,
    "adapter": _adapter,
    "position": _position,
    "rewind": _rewind,
    "error": _said,
    "deadline": _anything,  # checked later, with the priority
    "trace": _anything,  # checked later, as on HTTP routes
    "data": lambda name, value: value if isinstance(value, dict) else {},
}
_TYPED: Mapping[str, Callable[[str, Any], Any]] = {
    "Prompt": _prompt,
    "str": _text,
    "str | None": _text,
    "int": _integer,
    "int | None": _integer,
    "float | None": _number,
    "bool": _flag,
    "bool | None": _flag,
    "tuple[Any, ...]": _list,
    "Mapping[int, float]": _bias,
    "Mapping[str, Any] | None": _mapping,
}
_KINDS: Mapping[str, type[Request]] = {KINDS[kind]: kind for kind in get_args(Request)}
