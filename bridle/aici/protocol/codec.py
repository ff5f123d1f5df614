"""Converts messages to JSON and back. It also reads the fields that any request may have: who asks, the reply id, the
trace."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from bridle.aici.protocol.replies import Failure, JsonFailure, Ok
from bridle.aici.protocol.requests import LOCAL, Auth, Message, Request
from bridle.errors import ProtocolError

#: https://www.w3.org/TR/trace-context/
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_encoder = msgspec.json.Encoder()
_requests = msgspec.json.Decoder(Request)


def encode(message: Struct) -> bytes:
    """Any request or reply as JSON."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Decode a request. Raises `ProtocolError` if it is JSON but not a request, `msgspec.DecodeError` if it is not
    JSON."""
    try:
        request: Request = _requests.decode(data)
        return request
    except msgspec.ValidationError as error:
        msgspec.json.decode(data)  # tells broken JSON from a broken request
        raise ProtocolError(f"malformed request: {error}") from None


def auth_of(request: Message) -> Auth:
    """Who asks. A malformed `$auth` object raises `ProtocolError`; a value that is not an object counts as absent."""
    if not isinstance(request.auth, dict):
        return LOCAL
    try:
        return msgspec.convert(request.auth, Auth)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"malformed $auth: {error}") from None


def trace_of(request: Message) -> str | None:
    """The trace that a request belongs to; a malformed one counts as absent, as the standard demands."""
    told = request.traceparent
    return told if isinstance(told, str) and _TRACEPARENT.fullmatch(told) else None


def rid_of(request: Message | bytes) -> str | UnsetType:
    """The reply id, if it is a string, ready to be put into a reply. Takes raw bytes too, for requests that could
    not be decoded."""
    if isinstance(request, Message):
        rid = request.rid
    else:
        rid = _loose_rid(request)
    return rid if isinstance(rid, str) else UNSET


def _loose_rid(data: bytes) -> Any:
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    return value.get("$rid") if isinstance(value, dict) else None


def decode_reply(data: bytes, data_type: Any) -> Ok[Any] | Failure | JsonFailure:
    """Decode a reply whose `data`, if it has one, is a `data_type`. Raises `ProtocolError`."""
    try:
        reply: Ok[Any] | Failure | JsonFailure = _reply_decoder(data_type).decode(data)
        return reply
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed reply: {error}") from None


_reply_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def _reply_decoder(data_type: Any) -> msgspec.json.Decoder[Any]:
    decoder = _reply_decoders.get(data_type)
    if decoder is None:
        decoder = msgspec.json.Decoder(Ok[data_type] | Failure | JsonFailure)
        _reply_decoders[data_type] = decoder
    return decoder
