"""Messages of the AICI runtime protocol in both dialects: typed values, encoding and decoding, without I/O.

Dialect 1 (`post_pre_process` and `mid_process`) and dialect 2 (`mid_process` with branches) share the envelope, the
side channel and most fields. Both sides ignore unknown keys, so bridle's extra fields (marked "addition") do not
disturb an older peer. This module does not depend on channels or controllers.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from bridle.errors import ProtocolError

#: Names of bridle's additions to dialect 2. The reply to `tokens` lists them.
EXTENSIONS = (
    "ahead",
    "bias",
    "candidates",
    "changes",
    "constraints",
    "control_vectors",
    "deadline_ms",
    "discard",
    "draft",
    "get_module",
    "module_id",
    "options",
    "probes",
    "reply_ms",
    "retry_after",
    "sampling",
    "traceparent",
    "turns",
    "variables",
    "wait",
    "waits_for",
)

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
SeqId = Annotated[int, Meta(ge=0, lt=2**62)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Change = tuple[Count, Count, Count, str]


# -- requests, on the main channel and on the side channel ----------------------------------------------------


class Message(Struct, tag_field="op", kw_only=True, omit_defaults=True):
    """Fields common to all requests: an id that the reply repeats, the user, and the W3C trace context (an
    extension)."""

    rid: Any = field(name="$rid", default=None)
    auth: Any = field(name="$auth", default=None)
    traceparent: Any = None


class Ping(Message, tag="ping"):
    """Ask whether the runtime is alive."""


class Tokens(Message, tag="tokens"):
    """Request the size of the vocabulary."""


class Stop(Message, tag="stop"):
    """End the runtime. Never answered."""


class PostOp(Struct, omit_defaults=True):
    """Dialect 1: changes of a sequence in the last step. `backtrack` counts removed tokens, including a sampled token
    that was discarded."""

    id: SeqId
    tokens: list[TokenId]
    backtrack: Count = 0


class PreOp(Struct):
    """Dialect 1: assigns the instance created for request `req_id` to sequence `id`."""

    id: SeqId
    req_id: str


class PostPreProcess(Message, tag="post_pre_process"):
    """Dialect 1: the result of the last step, and the sequences that the next step may run."""

    post_ops: list[PostOp]
    pre_ops: list[PreOp]
    freed: list[SeqId]


class MidOp(Struct, omit_defaults=True):
    """One scheduled sequence. Dialect 1 uses only `id` and `clone_id`.

    Dialect 2: `tokens` were appended after `backtrack` older tokens were removed. `sampled` is the sampled token. The
    first op of a request has `req_id`; the first op of a fork has `clone_id` and `clone_idx`. Additions: `candidates`
    answers a branch that asked for `top_logprobs`. `turns` limits how often in a row the controller is asked while it
    does nothing. `variables` are set before the controller is asked: names, and values in hexadecimal. `ahead` are
    draft tokens, which the runtime shows to clones of the controller. `foreseen` is the number of `tokens` that clones
    have already seen as draft tokens. `changes` are the engine's changes to the controller's decision: position, number
    of removed tokens, number of inserted tokens, and the responsible policy. `probes` are the readings of the request's
    probes, in their order, at the position where `sampled` was sampled.
    """

    id: SeqId
    backtrack: Count | UnsetType = UNSET
    tokens: list[TokenId] | UnsetType = UNSET
    sampled: TokenId | None = None
    req_id: str | None = None
    clone_id: SeqId | None = None
    clone_idx: Count | None = None
    candidates: list[tuple[TokenId, float]] | None = None
    turns: Count = 1
    variables: list[tuple[str, str]] = []
    ahead: list[TokenId] = []
    foreseen: Count = 0
    changes: list[Change] = []
    probes: list[float] = []


class MidProcess(Message, tag="mid_process"):
    """Run the callbacks of the scheduled sequences. A `freed` key marks the message as dialect 2.

    Additions: `deadline_ms` is how long callbacks may take, if longer than the step limit. `reply_ms` is the latest
    time of the reply. A sequence without an answer at that time waits one step, but counts as late only after
    `deadline_ms`.
    """

    ops: list[MidOp]
    freed: list[SeqId] | UnsetType = UNSET
    deadline_ms: float | None = None
    reply_ms: float | None = None

    @property
    def dialect(self) -> int:
        return 1 if self.freed is UNSET else 2


class MkModule(Message, tag="mk_module"):
    """Upload a controller. `binary` is the Wasm module in base64."""

    binary: str


class GetTags(Message, tag="get_tags"):
    """Request all tags, newest first."""


class GetModule(Message, tag="get_module"):
    """Addition: request the module that an id or a name means now, without a download by the runtime."""

    module_id: str


class SetTags(Message, tag="set_tags"):
    """Set `tags` as names of a module."""

    module_id: str
    tags: list[str]


class Instantiate(Message, tag="instantiate"):
    """Create an instance for a request. The runtime tokenizes a prompt that is a string, as the original runtime
    does."""

    req_id: str
    prompt: list[TokenId] | str
    module_id: str
    module_arg: Raw = field(default_factory=lambda: Raw(b"null"))

    @property
    def argument(self) -> str:
        """Return the argument as the controller gets it: a string unchanged, any other value as its JSON text."""
        text = bytes(self.module_arg)
        if text[:1] == b'"':
            return msgspec.json.decode(text, type=str)
        return text.decode()


class Discard(Message, tag="discard"):
    """Addition: drop the instance of a request that will never run. Unknown ids are ignored."""

    req_id: str


Request = (
    Ping
    | Tokens
    | Stop
    | PostPreProcess
    | MidProcess
    | MkModule
    | GetTags
    | GetModule
    | SetTags
    | Instantiate
    | Discard
)


class Auth(Struct):
    """The user that sends a request. A request without a user comes from the user `local`, who has no admin rights."""

    user: str
    is_admin: bool


LOCAL = Auth("local", False)


# -- conversion to JSON and back -------------------------------------------------------------------------------

#: https://www.w3.org/TR/trace-context/
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_encoder = msgspec.json.Encoder()
_requests = msgspec.json.Decoder(Request)


def encode(message: Struct) -> bytes:
    """Return any request or reply as JSON."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Decode a request. Raises `ProtocolError` if the data is JSON but no request, `msgspec.DecodeError` if it is not
    JSON."""
    try:
        return _decode_request(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error}") from None


def _decode_request(data: bytes) -> Request:
    try:
        request: Request = _requests.decode(data)
        return request
    except msgspec.ValidationError as error:
        msgspec.json.decode(data)  # distinguishes malformed JSON from a malformed request
        raise ProtocolError(f"malformed request: {error}") from None


def auth_of(request: Message) -> Auth:
    """Return the user of a request. A malformed `$auth` object raises `ProtocolError`; a value that is not an
    object counts as absent."""
    if not isinstance(request.auth, dict):
        return LOCAL
    try:
        return msgspec.convert(request.auth, Auth)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"malformed $auth: {error}") from None


def trace_of(request: Message) -> str | None:
    """Return the W3C trace context of a request, or None. A malformed context is ignored, as the standard demands."""
    told = request.traceparent
    return told if isinstance(told, str) and _TRACEPARENT.fullmatch(told) else None


def rid_of(request: Message | bytes) -> str | UnsetType:
    """Return the id that the reply must repeat, if that id is a string. A request that could not be decoded is passed
    as raw bytes."""
    if isinstance(request, Message):
        rid = request.rid
    else:
        rid = _loose_rid(request)
    return rid if isinstance(rid, str) else UNSET


def _loose_rid(data: bytes) -> Any:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value.get("$rid") if isinstance(value, dict) else None
