"""Replies of the AICI runtime in both dialects, as typed values, and their decoding. Requests are in module
`protocol`."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from bridle.aici.protocol import Count, TokenId
from bridle.errors import ProtocolError

Data = TypeVar("Data")
Result = TypeVar("Result")


class Ok(Struct, Generic[Data], tag_field="type", tag="ok"):
    data: Data
    rid: str | UnsetType = field(name="$rid", default=UNSET)


class ErrorReply(Struct, tag_field="type", tag="error"):
    """A failure. With `is_user_error`, the text may be shown to end users. Addition: `retry_after` means that the
    runtime is full; a retry may succeed after this number of seconds."""

    error: str
    is_user_error: bool = False
    rid: str | UnsetType = field(name="$rid", default=UNSET)
    retry_after: float | UnsetType = UNSET


class JsonFailure(Struct, tag_field="type", tag="json-error"):
    """The reply to a request that is not JSON."""

    error: str


class WriteVar(Struct):
    """A write of a variable. `value` is in lower-case hexadecimal; `op` is `Set` or `Append`."""

    name: str
    value: str
    op: str
    when_version_is: int | None = None


class ReadVar(Struct):
    name: str


class StorageCommand(Struct):
    """A write or a read of a variable: exactly one of the two fields is set."""

    write: WriteVar | UnsetType = field(name="WriteVar", default=UNSET)
    read: ReadVar | UnsetType = field(name="ReadVar", default=UNSET)


class SeqResult(Struct, Generic[Result]):
    """The result of a callback for one sequence. `micros` is the callback's run time in microseconds, rounded down to a
    multiple of 10. Additions: `ahead` are the answers of clones to the first of the draft tokens. After an
    instantiation, `module_id` is the id of the instance's module."""

    error: str = ""
    result: Result | None = None
    storage: list[StorageCommand] = []
    logs: str = ""
    micros: int = 0
    ahead: list[LookaheadReply] | UnsetType = UNSET
    module_id: str | UnsetType = UNSET


class Pong(Struct):
    pong: int = 1


class TokensData(Struct):
    """The reply about the vocabulary. `eos_token_id` exists only in dialect 2. `extensions` is bridle's addition."""

    vocab_size: int
    eos_token_id: int | UnsetType = UNSET
    extensions: list[str] | UnsetType = UNSET


class PostResult(Struct):
    stop: bool


class PreResult(Struct):
    suspend: bool = False
    num_forks: int = 1
    ff_tokens: list[int] = []


class PostPreData(Struct):
    post_seqs: dict[int, SeqResult[PostResult]]
    pre_seqs: dict[int, SeqResult[PreResult]]


class MidResult(Struct):
    """A splice in dialect 1: drop the sampled token, remove `backtrack - 1` older tokens (none if `backtrack` is 0),
    append `ff_tokens`."""

    ff_tokens: list[int]
    backtrack: int


class MidData1(Struct):
    seqs: dict[int, SeqResult[MidResult]]
    num_seqs: int


class SpliceReply(Struct):
    when_sampled: list[TokenId] = []
    backtrack: Count = 0
    ff_tokens: list[TokenId] = []


class BranchReply(Struct):
    """Dialect 2: one branch of a sequence. `sample_mask` is a row index of the mask matrix; None means that nothing is
    sampled.

    bridle's additional fields:

    * `sampling`: sampling parameters for this one token, with the engine's names.
    * `bias`: pairs of a token and the value to add to its logit.
    * `top_logprobs`: report this number of candidates with the next op.
    * `wait`: the branch does nothing until an event, so the engine need not ask the controller soon.
    * `waits_for`, with `wait`: the variables that can end the wait, each with the version to exceed. If no
      variable is listed, the guest decides when it is asked again.
    * `turns`, in a branch that does nothing: how often in a row the guest did nothing.
    * `draft`: tokens that are likely to be sampled next. The engine computes draft tokens ahead, which saves time and
      does not change the output.
    * `options`: token sequences, one of which must come next. An engine may score the options as a whole instead of
      sampling under the mask.
    * `control_vectors`: new scales of the request's control vectors, from the branch's first token on.
    """

    sample_mask: int | None = None
    temperature: float | None = None
    splices: list[SpliceReply] = []
    sampling: dict[str, float | int] | UnsetType = UNSET
    bias: list[tuple[TokenId, float]] | UnsetType = UNSET
    top_logprobs: Count | UnsetType = UNSET
    wait: bool | UnsetType = UNSET
    waits_for: list[tuple[str, int]] | UnsetType = UNSET
    turns: Count | UnsetType = UNSET
    draft: list[TokenId] | UnsetType = UNSET
    options: list[list[TokenId]] | UnsetType = UNSET
    control_vectors: dict[str, float] | UnsetType = UNSET


class LookaheadReply(Struct):
    """Addition: a clone's answer to the draft token `token`, provided that the earlier draft tokens precede it. The
    message has the clone's logs and writes. Logs and writes take effect once the token is sampled, and are not sent
    again."""

    token: TokenId
    branches: list[BranchReply]
    logs: str = ""
    storage: list[StorageCommand] = []


class Branches(Struct):
    branches: list[BranchReply]


class MidData2(Struct):
    seqs: dict[int, SeqResult[Branches]]
    dtype: str
    first_mask_byte_offset: int
    mask_num_bytes: int
    mask_num_elts: int
    num_masks: int


class ModuleData(Struct):
    """The reply about a compiled module. `time` is the compile time in milliseconds."""

    module_id: str
    wasm_size: int
    compiled_size: int
    time: int


class TagInfo(Struct):
    tag: str
    module_id: str
    updated_at: int
    updated_by: str
    wasm_size: int
    compiled_size: int


class TagsData(Struct):
    tags: list[TagInfo]


class PromptResult(Struct):
    prompt: list[TokenId]


def decode_reply(data: bytes, data_type: Any) -> Ok[Any] | ErrorReply | JsonFailure:
    """Decode a reply. The reply's `data`, if present, has the type `data_type`. Raises `ProtocolError`."""
    try:
        reply: Ok[Any] | ErrorReply | JsonFailure = _reply_decoder(data_type).decode(data)
        return reply
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed reply: {error}") from None


_reply_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def _reply_decoder(data_type: Any) -> msgspec.json.Decoder[Any]:
    decoder = _reply_decoders.get(data_type)
    if decoder is None:
        decoder = msgspec.json.Decoder(Ok[data_type] | ErrorReply | JsonFailure)
        _reply_decoders[data_type] = decoder
    return decoder
