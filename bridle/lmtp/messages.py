"""The messages of LMTP as plain values.

A client sends requests, a server answers; `encoding` and `decoding` convert both to and from text. Types and fields
beyond the original protocol are marked as extensions; peers that do not know them never see one unless they asked. A
server announces them in its answer to MODEL_INFO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bridle.errors import BridleError

StreamId: TypeAlias = int | str
Prompt: TypeAlias = tuple[int, ...] | str

#: Longest message from a client: half of a 128k vocabulary in a `logit_bias` is about 1 MB.
MAX_MESSAGE_BYTES = 16 << 20
#: `model_info` of a model that is still being loaded, or of none.
UNAVAILABLE = "<unavailable>"
#: The limit of a GENERATE that sets none.
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
    """Continue a context. `options` are further sampling parameters by name (`top_p`, `stop`, `seed`, ...).

    The rest are extensions. `text` asks for text in addition to the tokens. A `prompt` may be text itself, and then
    this is the default. The context is the buffer's tokens and then the prompt's; `save` names context and output
    together as a buffer once the stream has ended. `adapter` names an adapter over the model. `key` makes the stream
    resumable: a request that is sent again with the same content does not start again but continues, from the answer
    number `position`. With `rewind` = `event` the client receives rewinds and forks instead of waiting for final
    tokens. `images` are `data:` URLs for the context's placeholders, in order; `audio` are the sounds, `video` the
    videos. `trace` asks the server to keep a trace (true), or also to send its records (`events`). Without `max_tokens`
    the server uses its own limit: `DEFAULT_MAX_TOKENS` unless its operator sets another. Waiting requests are served in
    the order of `priority`, smaller numbers first. The stream ends after `deadline` seconds.
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
    """Log-probabilities of `scored` after `prompt` (and after `buffer`, an extension, as text is)."""

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
    """Facts about a model. `data` with `{"lmtp": {"version": 1}}` says that this client knows the extensions: from then
    on its connection gets `EVENT` messages, and gets errors at once that would otherwise be held back for LMQL."""

    stream_id: StreamId
    model: str
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_extended(self) -> bool:
        return isinstance(self.data.get("lmtp"), Mapping)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Extension: end a stream. It is answered by an error with code `cancelled`, unless the stream has ended
    already."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Extension: continue the stream that was started with `key`, from the answer number `position`."""

    stream_id: StreamId
    key: str
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Extension: give a prefix a name, for as long as the connection lasts. Its tokens are the first `length` of buffer
    `parent` (None: all) and then those of `prompt`. With `drop` the name is forgotten. Answered by a `MSG`."""

    stream_id: StreamId
    model: str
    name: str
    prompt: Prompt = ()
    parent: str | None = None
    length: int | None = None
    drop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Extension: answer a call of a tool that an event `tool_call` has reported, by its `id`: with a `result`, text or
    JSON, or with an `error` message. Any connection of the same user may. Answered by a `MSG`."""

    stream_id: StreamId
    id: str
    result: Any = None
    error: str | None = None


Request: TypeAlias = Generate | Score | ModelInfo | Cancel | Resume | Buffer | ToolResult


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message that is not a valid request: the intended kind of request, if it was readable, and the error."""

    kind: str
    stream_id: StreamId | None
    error: BridleError


# -- server to client ----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Token:
    """One token of a stream. A `finish_reason` ends its branch, of which there is one unless the client asked for
    events. `text`, `position` (among the stream's answers), `branch`, `usage` and `seed` are extensions; so is `token`
    None, which ends a branch that has no token left to carry the reason. A `seed` repeats the sampled tokens."""

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
    """A stream ended with an error. All fields but `error` are extensions: the kind of error, whether another try may
    help and after how many seconds, and which field was at fault."""

    stream_id: StreamId
    error: str
    code: str = "error"
    retryable: bool = False
    retry_after: float | None = None
    param: str | None = None
    position: int | None = None


@dataclass(slots=True, kw_only=True)
class Msg:
    """The answer to a request that has no stream, or to an unreadable request. `code`, `lmtp` (the extensions, where
    `model_info` cannot name them), `buffer` with its `num_tokens` and `tool_result`, the id of a call that was
    answered, are extensions."""

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
    """Extension: a notice about a stream or (without `stream_id`) about the server.

    `queued`, `loading`, `loaded` and `draining` explain delays. `rewind` rolls back `num_tokens` and `num_chars` of a
    branch. `fork` begins `branch` as a copy of the first `num_tokens` tokens of `parent`. `log` is output of a
    controller. `tool_call` asks the client to answer the call `id` of the tool `name`, with a `ToolResult`. `trace`
    reports whether a trace is kept, and then its records.
    """

    event: str
    stream_id: StreamId | None = None
    position: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


#: The answers to a stream, and the answers on a connection.
StreamAnswer: TypeAlias = Token | Failure | EventMessage
Answer: TypeAlias = StreamAnswer | Msg

#: The word that each message begins with.
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
    """The extensions that a server announces in its answer to MODEL_INFO; empty for a server without extensions."""
    info = answer.model_info
    found = info.get("lmtp") if isinstance(info, dict) else answer.lmtp
    return found if isinstance(found, dict) else {}
