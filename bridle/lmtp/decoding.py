"""Decodes a client's messages, for servers. Any text gives a request, or a `Rejected` that says what is wrong.

Only the form and the type of each field are checked here. What depends on a model is checked in `server.requests`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from bridle.errors import BridleError, InvalidRequest, ProtocolError
from bridle.lmtp.messages import (
    Buffer,
    Cancel,
    Generate,
    ModelInfo,
    Prompt,
    Rejected,
    Request,
    Resume,
    Score,
    StreamId,
)
from bridle.shown import shown

_MAX_ID_CHARS = 200
_MAX_NAME_CHARS = 200
_MAX_KIND_CHARS = 80


def decode_request(message: str, loads: Callable[[str], Any] = json.loads) -> Request | Rejected:
    """Read one message. `loads` may be another reader of JSON that raises `ValueError`, or `InvalidRequest` for JSON
    that holds too much."""
    kind, _, text = message.partition(" ")
    begun = kind[:_MAX_KIND_CHARS]
    if kind not in _READERS and (not text or not kind.isidentifier()):
        return Rejected(begun, None, ProtocolError(f"{begun!r} is no message; one is TYPE, a space, and a JSON object"))
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
    if kind not in _READERS:
        return Rejected(begun, stream_id, ProtocolError(f"Unknown command: {begun}"))
    try:
        return _READERS[kind](_Fields(body))
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


class _Fields:
    """The fields of a payload, each taken once and checked for its form. Null counts as absent."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def take(self, name: str, default: Any = None) -> Any:
        value = self._body.pop(name, None)
        return default if value is None else value

    def stream_id(self) -> StreamId:
        value: StreamId = self._body.pop("stream_id")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not (isinstance(value, str) and 0 < len(value) <= _MAX_NAME_CHARS):
            raise InvalidRequest(f"{name} is {shown(value)}; must be 1 to {_MAX_NAME_CHARS} characters", name)
        return value

    def adapter(self) -> str | None:
        """The name of an adapter. The empty name means the model without an adapter, as everywhere."""
        if self._body.get("adapter") == "":
            del self._body["adapter"]
        return self.text("adapter")

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise InvalidRequest(f"{name!r} is missing", name)
        return value

    def model(self) -> str:
        value = self.take("model")
        if not isinstance(value, str):
            raise InvalidRequest("'model' is missing; it names the model", "model")
        return value

    def integer(self, name: str, default: int | None) -> Any:
        value = self.take(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidRequest(f"{name} is {shown(value)}; must be an integer", name)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequest(f"{name} is {shown(value)}; must be a number", name)
        return value

    def flag(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"{name} is {shown(value)}; must be true or false", name)
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.take(name, choices[0])
        if value not in choices:
            raise InvalidRequest(f"{name} is {shown(value)}; must be one of {', '.join(choices)}", name)
        return str(value)

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise InvalidRequest(f"{name} is {shown(value)}; must be an object", name)
        return value

    def prompt(self, name: str, required: bool = True) -> Prompt:
        """A prompt: text, or token ids, among which nulls are ignored."""
        value = self.take(name, None if required else ())
        if isinstance(value, str):
            return value
        if value is None:
            raise InvalidRequest(f"{name!r} is missing", name)
        if not isinstance(value, (list, tuple)) or not set(map(type, value)) <= {int, type(None)}:
            raise InvalidRequest(f"{name} must be a list of token ids, or text", name)
        return tuple(value) if None not in value else tuple(token for token in value if token is not None)

    def bias(self) -> Mapping[int, float]:
        value = self.mapping("logit_bias") or {}
        try:
            return dict(zip(map(int, value), map(float, value.values()), strict=True))
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias") from None

    def rest(self) -> dict[str, Any]:
        return {name: value for name, value in self._body.items() if value is not None}


def _read_generate(given: _Fields) -> Generate:
    return Generate(
        stream_id=given.stream_id(),
        model=given.model(),
        prompt=given.prompt("prompt", required="buffer" not in given._body),
        max_tokens=given.integer("max_tokens", 32),
        temperature=given.number("temperature", 0.0),
        top_logprobs=given.integer("top_logprobs", 1),
        logit_bias=given.bias(),
        text=given.flag("text"),
        buffer=given.text("buffer"),
        save=given.text("save"),
        key=given.text("key"),
        position=_position(given),
        controller=given.text("controller"),
        controller_arg=given.take("controller_arg"),
        constraint=given.mapping("constraint"),
        adapter=given.adapter(),
        rewind=given.choice("rewind", ("hold", "event")),
        priority=given.integer("priority", None),
        deadline=given.take("deadline"),
        options=given.rest(),
    )


def _read_score(given: _Fields) -> Score:
    return Score(
        stream_id=given.stream_id(),
        model=given.model(),
        scored=given.prompt("scored"),
        prompt=given.prompt("prompt", required="buffer" not in given._body),
        buffer=given.text("buffer"),
        adapter=given.adapter(),
        priority=given.integer("priority", None),
        deadline=given.take("deadline"),
    )


def _read_model_info(given: _Fields) -> ModelInfo:
    data = given.take("data")
    return ModelInfo(stream_id=given.stream_id(), model=given.model(), data=data if isinstance(data, dict) else {})


def _read_cancel(given: _Fields) -> Cancel:
    return Cancel(stream_id=given.stream_id())


def _read_resume(given: _Fields) -> Resume:
    return Resume(stream_id=given.stream_id(), key=given.required_text("key"), position=_position(given))


def _read_buffer(given: _Fields) -> Buffer:
    return Buffer(
        stream_id=given.stream_id(),
        model=given.model(),
        name=given.required_text("name"),
        prompt=given.prompt("prompt", required=False),
        parent=given.text("parent"),
        length=given.integer("length", None),
        drop=bool(given.flag("drop")),
    )


def _position(given: _Fields) -> int:
    value: int = given.integer("position", 0)
    if value < 0:
        raise InvalidRequest(f"position is {value}; must be at least 0", "position")
    return value


_READERS: Mapping[str, Callable[[_Fields], Request]] = {
    "GENERATE": _read_generate,
    "SCORE": _read_score,
    "MODEL_INFO": _read_model_info,
    "CANCEL": _read_cancel,
    "RESUME": _read_resume,
    "BUFFER": _read_buffer,
}
