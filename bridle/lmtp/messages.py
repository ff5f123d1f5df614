"""The messages of LMTP as plain data classes.

A client sends requests, and a server answers; `encoding` and `decoding` convert messages to and from text. Message
types and fields that the original protocol does not have are marked as extensions. A peer that does not know the
extensions gets only extensions that it requests. A server announces its extensions in its answer to MODEL_INFO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bridle.errors import BridleError

StreamId: TypeAlias = int | str
Prompt: TypeAlias = tuple[int, ...] | str

#: The maximum size of a message from a client: a `logit_bias` for half of a 128k vocabulary is about 1 MB.
MAX_MESSAGE_BYTES = 16 << 20
#: The `model_info` of a model that is being loaded, or that does not exist.
UNAVAILABLE = "<unavailable>"
#: The token limit of a GENERATE without `max_tokens`.
DEFAULT_MAX_TOKENS = 32
#: The extensions, as `model_info` announces them under `lmtp`.
FEATURES: Mapping[str, Any] = {
    "version": 1,
    "text": True,
    "buffers": True,
    "cancel": True,
    "errors": True,
    "events": True,
    "resume": True,
    "control": True,
    "adapters": True,
    "terms": True,
    "images": True,
    "audio": True,
    "video": True,
    "traces": True,
    "tool_results": True,
    "max_message_bytes": MAX_MESSAGE_BYTES,
}


# -- client to server ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Request to continue a context. `options` are further sampling parameters by name (`top_p`, `stop`, `seed`, ...).

    All fields after `options` are extensions. `text` requests text in addition to the tokens; this is the default if
    `prompt` is text. The context is the tokens of `buffer`, then the prompt. When the stream has ended, context and
    output are stored as a buffer with the name `save`. `adapter` names a LoRA adapter of the model. `key` makes the
    stream resumable: a repeated request with the same content continues the stream, from answer number `position`. If
    `rewind` is `event`, the client receives tokens at once, and events for rewinds and forks. `images`, `audio` and
    `video` are `data:` URLs for the context's placeholders, in order. If `trace` is true, the server stores a trace; if
    it is `events`, it also sends the trace records. The server's limit replaces a missing `max_tokens`; it is
    `DEFAULT_MAX_TOKENS` unless the operator sets another. Waiting requests are served in the order of `priority`,
    smaller numbers first. The stream ends after `deadline` seconds.
    """

    stream_id: StreamId
    model: str
    prompt: Prompt = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_logprobs: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    text: bool | None = None
    buffer: str | None = None
    save: str | None = None
    key: str | None = None
    position: int = 0
    controller: str | None = None
    controller_arg: Any = None
    controllers: tuple[Any, ...] = ()
    client_tools: tuple[Any, ...] = ()
    constraint: Mapping[str, Any] | None = None
    adapter: str | None = None
    rewind: str = "hold"
    images: tuple[Any, ...] = ()
    audio: tuple[Any, ...] = ()
    video: tuple[Any, ...] = ()
    trace: bool | str | None = None
    priority: int | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Request for the log-probabilities of the tokens `scored` after `prompt`. Extensions: text instead of tokens, and
    a `buffer` before the prompt."""

    stream_id: StreamId
    model: str
    scored: Prompt
    prompt: Prompt = ()
    buffer: str | None = None
    adapter: str | None = None
    trace: bool | str | None = None
    priority: int | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Request for the description of a model. `{"lmtp": {"version": 1}}` in `data` says that the client knows the
    extensions. After this request, the connection gets `EVENT` messages. Errors are also sent at once; for other
    clients some errors are delayed because of LMQL."""

    stream_id: StreamId
    model: str
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_extended(self) -> bool:
        return isinstance(self.data.get("lmtp"), Mapping)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Extension: request to end a stream. The stream ends with an error with code `cancelled`, unless it has ended
    already."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Extension: request to continue the stream that was started with `key`, from answer number `position`."""

    stream_id: StreamId
    key: str
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Extension: request to store a prompt prefix under a name until the connection ends. The prefix is the first
    `length` tokens of buffer `parent` (None: all), then `prompt`. If `drop`, the name is deleted. The server answers
    with a `MSG`."""

    stream_id: StreamId
    model: str
    name: str
    prompt: Prompt = ()
    parent: str | None = None
    length: int | None = None
    drop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Extension: the answer to tool call `id`, which an event `tool_call` has reported: a `result` as text or JSON, or
    an `error` message. Any connection of the same user may answer. The server confirms with a `MSG`."""

    stream_id: StreamId
    id: str
    result: Any = None
    error: str | None = None


Request: TypeAlias = Generate | Score | ModelInfo | Cancel | Resume | Buffer | ToolResult


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message that is not a valid request: the error, and the type of the request if that could be read."""

    kind: str
    stream_id: StreamId | None
    error: BridleError


# -- server to client ----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Token:
    """One token of a stream. A `finish_reason` ends the token's branch; a stream has one branch, unless the client
    requested events. Extensions: `text`, `position` (the number of the answer in its stream), `branch`, `usage` and
    `seed`. A `token` of None is also an extension: it ends a branch that has no last token. A new request with this
    `seed` samples the same tokens."""

    stream_id: StreamId
    token: int | None
    logprob: float | None = None
    finish_reason: str | None = None
    top_logprobs: Mapping[int, float] | None = None
    text: str | None = None
    position: int | None = None
    branch: int = 0
    usage: Mapping[str, Any] | None = None
    seed: int | None = None


@dataclass(slots=True, kw_only=True)
class Failure:
    """The end of a stream with an error. All fields except `error` are extensions: kind of error, whether and after how
    many seconds a retry may succeed, and the invalid field."""

    stream_id: StreamId
    error: str
    code: str = "error"
    retryable: bool = False
    retry_after: float | None = None
    param: str | None = None
    position: int | None = None


@dataclass(slots=True, kw_only=True)
class Msg:
    """The answer to a request without a stream, or to an invalid message. Extensions: `code`, `lmtp` (the server's
    extensions, if `model_info` cannot have them), `buffer` with its `num_tokens`, and `tool_result`, the id of an
    answered call."""

    stream_id: StreamId | None
    model_info: Any = None
    error: str | None = None
    code: str | None = None
    lmtp: Mapping[str, Any] | None = None
    buffer: str | None = None
    num_tokens: int | None = None
    tool_result: str | None = None


@dataclass(slots=True, kw_only=True)
class EventMessage:
    """Extension: a notice about a stream or, without `stream_id`, about the server.

    `queued`, `loading`, `loaded` and `draining` explain delays. `rewind` rolls back `num_tokens` and `num_chars` of a
    branch. `fork` begins `branch` as a copy of the first `num_tokens` tokens of branch `parent`. `log` is the log
    output of a controller. `tool_call` asks the client to answer the call `id` of the tool `name` with a `ToolResult`.
    `trace` first reports whether a trace is stored; later events have the trace records.
    """

    event: str
    stream_id: StreamId | None = None
    position: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


#: The answers of a stream, and all answers on a connection.
StreamAnswer: TypeAlias = Token | Failure | EventMessage
Answer: TypeAlias = StreamAnswer | Msg

#: The first word of each type of message.
KINDS: Mapping[type, str] = {
    Generate: "GENERATE",
    Score: "SCORE",
    ModelInfo: "MODEL_INFO",
    Cancel: "CANCEL",
    Resume: "RESUME",
    Buffer: "BUFFER",
    ToolResult: "TOOL_RESULT",
    Token: "TOKEN",
    Failure: "TOKEN",
    Msg: "MSG",
    EventMessage: "EVENT",
}


def features_of(answer: Msg) -> Mapping[str, Any]:
    """Return the extensions that a server announces in its answer to MODEL_INFO; empty for a server without
    extensions."""
    info = answer.model_info
    found = info.get("lmtp") if isinstance(info, dict) else answer.lmtp
    return found if isinstance(found, dict) else {}
