"""The results of a request: events while it runs, and the outputs that they add up to.

Every front-end (HTTP, LMTP, the Python API) reads the same events and turns them into its own format. Events are plain
data. Positions count generated tokens of one output, from 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bridle.constraint_usage import ConstraintUsage
from bridle.errors import BridleError
from bridle.traces import Later, Record, Trace, made
from bridle.traces.highlight import page_of


class FinishReason(str, Enum):
    """Why an output ended."""

    STOP = "stop"  # end-of-sequence token, stop token, stop string, stopping criterion
    LENGTH = "length"  # max_tokens or the context limit
    CONTROLLER = "controller"  # its controller said stop
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    OUTRANKED = "outranked"  # others of its request are certainly better
    ERROR = "error"


#: How outputs end that somebody may go on from.
BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.CONTROLLER})


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability (natural logarithm) of one token, and the best alternatives, best first.

    `top` holds (token, log-probability) pairs. `rank` counts from 1; None where it was not computed. `text` is the
    token's own text, `top_texts` are those of `top`; an engine with a tokenizer fills them in.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    text: str = ""
    top_texts: tuple[str, ...] = ()

    def spelled(self, text_of: Callable[[int], str]) -> Logprob:
        """The same value with its texts filled in."""
        texts = tuple([text_of(token) for token, _ in self.top])
        return Logprob(self.token, self.logprob, self.top, self.rank, text_of(self.token), texts)


@dataclass(slots=True)
class Usage:
    """Exact counts of one output. `completion_tokens` counts the sampled and forced tokens that were not rolled
    back. `constraint` is measured only on request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    completion_tokens: int = 0
    sampled_tokens: int = 0  # draws, including those of tokens that were rolled back
    forced_tokens: int = 0  # appended by a controller without sampling
    rewound_tokens: int = 0  # rolled back
    shared_tokens: int = 0  # tokens computed once, by the sequence that this one was forked from
    drafted_tokens: int = 0  # guessed and computed before they were sampled
    accepted_tokens: int = 0  # of those, the ones that were sampled
    retained_tokens: int = 0  # of the prompt, whose KV is kept as the request asked for
    spared_tokens: int = 0  # the most that an output that was outranked could still have had
    constraint: ConstraintUsage | None = None

    @property
    def rejected_tokens(self) -> int:
        """Drafted tokens that were not sampled."""
        return self.drafted_tokens - self.accepted_tokens

    def predictions(self) -> dict[str, int]:
        """The draft tokens in OpenAI's fields, from any proposer."""
        return {
            "accepted_prediction_tokens": self.accepted_tokens,
            "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
        }

    def constraint_fields(self) -> dict[str, Any]:
        """The field `constraint` as plain data; nothing if it was not measured."""
        return {} if self.constraint is None else {"constraint": self.constraint.to_dict()}

    def fields(self) -> dict[str, Any]:
        """All counts by name, for protocols that have no names of their own for them."""
        counts = {name: getattr(self, name) for name in TOKEN_KINDS.values()}
        return counts | self.predictions() | self.constraint_fields()

    def add(self, other: Usage) -> None:
        """Add `other`'s counts to these: the usage of a request is the sum over its outputs."""
        for name in TOKEN_KINDS.values():
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.constraint is not None:
            self.constraint = self.constraint or ConstraintUsage()
            self.constraint.add(other.constraint)


#: The kinds of tokens, in the words of logs and metrics, and the fields of `Usage` that count them.
TOKEN_KINDS = {name.removesuffix("_tokens"): name for name in Usage.__slots__ if name.endswith("_tokens")}


@dataclass(slots=True)
class Event:
    """Something that happened to output `index` of request `request_id`.

    Events are not frozen, because freezing costs a microsecond for each of the thousands that a second makes.
    Nobody changes one after it was made.
    """

    request_id: str
    index: int


@dataclass(slots=True)
class PromptEvent(Event):
    """The prompt was computed: how much of it was cached, and its log-probabilities if asked for.

    `logprobs[i]` belongs to prompt token i; the first is None. `opening` is how long, in seconds, its controller took
    to be made, `queued` how long the request then waited for room. Sent once per request, before any token.
    """

    tokens: tuple[int, ...] = ()
    num_cached: int = 0
    logprobs: tuple[Logprob | None, ...] = ()
    queued: float = field(default=0.0, compare=False)
    opening: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class PromptProgress(Event):
    """A part of the prompt was computed: so far `num_computed` tokens, in addition to `num_cached` that were found in
    the prefix cache. Sent after each step that leaves some of it to do. Readers of a stream get it only if they ask for
    it (`EventStream.with_progress`); `EventStream.prompt` is the latest."""

    num_computed: int = 0
    num_cached: int = 0


@dataclass(slots=True)
class TokenEvent(Event):
    """One more token. `text` is the text that became certain with it: text that could still be part of a stop string or
    of an unfinished character comes with a later event."""

    token: int = 0
    text: str = ""
    logprob: Logprob | None = None
    forced: bool = False


@dataclass(slots=True)
class Rewind(Event):
    """The last `num_tokens` tokens and `num_chars` characters already sent for this output are rolled back."""

    num_tokens: int = 0
    num_chars: int = 0


@dataclass(slots=True)
class Forked(Event):
    """Output `index` was created as a copy of `parent`, which had `num_tokens` tokens and the text `text` (released so
    far) at that moment."""

    parent: int = 0
    num_tokens: int = 0
    text: str = ""


@dataclass(slots=True)
class Log(Event):
    """Text that a controller printed."""

    text: str = ""


@dataclass(slots=True)
class Stored(Event):
    """A controller wrote a shared variable, or appended `value` to it."""

    name: str = ""
    value: bytes = b""
    is_append: bool = False


@dataclass(slots=True)
class Embedded(Event):
    """The vector of a prompt, which has length 1."""

    vector: array[float] = field(default_factory=lambda: array("f"))


@dataclass(slots=True)
class Resuming(Event):
    """The device that computed this output is lost; the output continues once there is a device again. Sent only to
    requests that ask for it."""


@dataclass(slots=True)
class Traced(Event):
    """A record of the output's trace, sent as it happens to requests that ask for one. There may be several for one
    token, and they come before the events that they are about. It is `told` as a function that makes it, until it is
    read."""

    told: Record | Later

    @property
    def record(self) -> Record:
        """Return the record, made on first use."""
        self.told = record = made(self.told)
        return record


@dataclass(slots=True)
class Finished(Event):
    """The output is complete; no event follows for it. `text` is text held back until now. `stop` is the token or the
    string that ended it, `error` the error that did. `is_last` ends the whole request. `held` is how long, in seconds,
    its controller kept it from going on."""

    reason: FinishReason = FinishReason.STOP
    usage: Usage = field(default_factory=Usage)
    text: str = ""
    stop: int | str | None = None
    error: BridleError | None = None
    is_last: bool = True
    held: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class ToolCall:
    """A function that the model calls; `arguments` is JSON text, and the client sends the result back under `id`."""

    name: str
    id: str
    arguments: str = ""


@dataclass(slots=True)
class ChatMessage:
    """An output of a conversation, parsed: the model's reasoning, its text, and the functions that it calls."""

    thoughts: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def _repr_html_(self) -> str:
        """The message for a notebook: reasoning is pale, and calls are below the text."""
        calls = [f"{call.name}({call.arguments})" for call in self.calls]
        thoughts = f"{self.thoughts}\n" if self.thoughts else ""
        return page_of(None, thoughts, ["\n".join(filter(None, [self.content, *calls]))], [0])


@dataclass(slots=True)
class CompletionOutput:
    """One finished (or growing) output of a request. `text` is the whole text of the model; `message` is the same
    parsed, once a conversation's output has ended. `score` is that of a beam: the sum of its log-probabilities, divided
    by its length to the power of the length penalty. `seed` repeats this output alone, as a request's only one; a beam
    has none, and neither have the forks of a controller among several outputs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage = field(default_factory=Usage)
    logs: str = ""
    error: BridleError | None = None
    message: ChatMessage | None = None
    score: float | None = None
    seed: int | None = None

    def _repr_html_(self) -> str:
        """The text for a notebook; where its tokens came from, the whole `RequestOutput` shows."""
        return page_of(None, "", [self.text], [self.index])


#: The variable with the probabilities of the options of a choice, in their order, and their log-probabilities.
OPTIONS = "bridle.options"


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one request, in order of their index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprob | None] | None = None
    num_cached_tokens: int = 0
    storage: dict[str, bytes] = field(default_factory=dict)
    embedding: array[float] | None = None
    trace: Trace | None = None

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    def _repr_html_(self) -> str:
        """The output for a notebook; with a trace, tokens have the colours of where they came from."""
        texts, indexes = [output.text for output in self.outputs], [output.index for output in self.outputs]
        return page_of(self.trace, self.prompt or "", texts, indexes)

    @property
    def message(self) -> ChatMessage | None:
        """The first output of a conversation, split into reasoning, content and tool calls."""
        return self.outputs[0].message

    @property
    def usage(self) -> Usage:
        """Counts summed over the outputs; the prompt is counted once."""
        total = Usage()
        for output in self.outputs:
            total.add(output.usage)
        if self.outputs:
            total.prompt_tokens = self.outputs[0].usage.prompt_tokens
            total.cached_tokens = self.outputs[0].usage.cached_tokens
        return total
