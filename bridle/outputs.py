"""Results of a request: events while it runs, and the outputs that are built from these events.

Every front end (HTTP, LMTP, the Python API) reads the same events and converts them to its own format. Events are plain
data. Positions count the generated tokens of one output, from 0.
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
    """The reason why an output ended."""

    STOP = "stop"  # end-of-sequence token, stop token, stop string, stopping criterion
    LENGTH = "length"  # max_tokens or the context limit
    CONTROLLER = "controller"  # its controller decided to stop
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    OUTRANKED = "outranked"  # other outputs of its request are certainly better
    ERROR = "error"


#: Reasons of ends from which a later request may continue the conversation.
BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.CONTROLLER})


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability (natural logarithm) of one token, and of its most probable alternatives, best first.

    `top` has (token, log-probability) pairs. `rank` is the token's rank by probability, from 1; None if it was not
    computed. `text` is the text of the token, and `top_texts` are the texts of the tokens in `top`. An engine with a
    tokenizer fills in `text` and `top_texts`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    text: str = ""
    top_texts: tuple[str, ...] = ()

    def spelled(self, text_of: Callable[[int], str]) -> Logprob:
        """Return a copy of this log-probability with the texts of its tokens filled in."""
        texts = tuple([text_of(token) for token, _ in self.top])
        return Logprob(self.token, self.logprob, self.top, self.rank, text_of(self.token), texts)


@dataclass(slots=True)
class Usage:
    """Exact token counts of one output. `completion_tokens` counts the sampled and forced tokens that were not rolled
    back. `constraint` is measured only if the request asks for it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    completion_tokens: int = 0
    sampled_tokens: int = 0  # sampled tokens, including those that were rolled back
    forced_tokens: int = 0  # appended by a controller without sampling
    rewound_tokens: int = 0  # rolled back
    shared_tokens: int = 0  # tokens whose KV was computed once, by the sequence from which this one was forked
    drafted_tokens: int = 0  # guessed and computed before they were sampled
    accepted_tokens: int = 0  # draft tokens that were accepted
    retained_tokens: int = 0  # prompt tokens whose KV is kept, as the request asked
    spared_tokens: int = 0  # maximum number of tokens that an outranked output could still have had
    constraint: ConstraintUsage | None = None

    @property
    def rejected_tokens(self) -> int:
        """Return the number of draft tokens that were not accepted."""
        return self.drafted_tokens - self.accepted_tokens

    def predictions(self) -> dict[str, int]:
        """Return the counts of draft tokens, from all proposers, under OpenAI's field names."""
        return {
            "accepted_prediction_tokens": self.accepted_tokens,
            "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
        }

    def constraint_fields(self) -> dict[str, Any]:
        """Return the field `constraint` as plain data; empty if it was not measured."""
        return {} if self.constraint is None else {"constraint": self.constraint.to_dict()}

    def fields(self) -> dict[str, Any]:
        """Return all counts by name, for protocols that define no names for counts."""
        counts = {name: getattr(self, name) for name in TOKEN_KINDS.values()}
        return counts | self.predictions() | self.constraint_fields()

    def add(self, other: Usage) -> None:
        """Add the counts of `other`. The usage of a request is the sum over its outputs."""
        for name in TOKEN_KINDS.values():
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.constraint is not None:
            self.constraint = self.constraint or ConstraintUsage()
            self.constraint.add(other.constraint)


#: The kinds of tokens, as named in logs and metrics, and the fields of `Usage` that count them.
TOKEN_KINDS = {name.removesuffix("_tokens"): name for name in Usage.__slots__ if name.endswith("_tokens")}


@dataclass(slots=True)
class Event:
    """An event of output `index` of request `request_id`.

    Events are not frozen, because freezing costs a microsecond per event and there are thousands of events per second.
    An event must not be changed after its creation.
    """

    request_id: str
    index: int


@dataclass(slots=True)
class PromptEvent(Event):
    """The prompt was computed. The event has the number of cached tokens, and the log-probabilities of the prompt if
    they were requested.

    `logprobs[i]` belongs to prompt token i; `logprobs[0]` is None. `opening` is the time in seconds to create the
    controller. `queued` is the time in seconds that the request then waited for room in the engine. The event is sent
    once for each request, before any token.
    """

    tokens: tuple[int, ...] = ()
    num_cached: int = 0
    logprobs: tuple[Logprob | None, ...] = ()
    queued: float = field(default=0.0, compare=False)
    opening: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class PromptProgress(Event):
    """Part of the prompt was computed: `num_computed` tokens so far. A further `num_cached` prompt tokens came from the
    prefix cache. The event is sent after each step that leaves part of the prompt to compute. Readers of a stream get
    this event only on request (`EventStream.with_progress`). `EventStream.prompt` is the latest event of this kind."""

    num_computed: int = 0
    num_cached: int = 0


@dataclass(slots=True)
class TokenEvent(Event):
    """One more token. `text` is the text that became final with the token. Text that may still be part of a stop string
    or of an unfinished character comes with a later event."""

    token: int = 0
    text: str = ""
    logprob: Logprob | None = None
    forced: bool = False


@dataclass(slots=True)
class Rewind(Event):
    """The last `num_tokens` tokens and `num_chars` characters that were sent for this output are rolled back."""

    num_tokens: int = 0
    num_chars: int = 0


@dataclass(slots=True)
class Forked(Event):
    """Output `index` was created as a copy of output `parent`. At the time of the fork, `parent` had `num_tokens`
    tokens and the released text `text`."""

    parent: int = 0
    num_tokens: int = 0
    text: str = ""


@dataclass(slots=True)
class Log(Event):
    """Text that a controller printed."""

    text: str = ""


@dataclass(slots=True)
class Stored(Event):
    """A controller set a shared variable to `value`, or appended `value` to it."""

    name: str = ""
    value: bytes = b""
    is_append: bool = False


@dataclass(slots=True)
class Embedded(Event):
    """The vector of a prompt, scaled to length 1."""

    vector: array[float] = field(default_factory=lambda: array("f"))


@dataclass(slots=True)
class Resuming(Event):
    """The device that computed this output is lost. The output continues when a device is available again. The event is
    sent only to requests that ask for it (`tell_resuming`)."""


@dataclass(slots=True)
class Traced(Event):
    """A record of the output's trace, sent to requests that ask for a trace. There may be several trace records for one
    token. The records come before the events that they describe. `told` is the record, or a function that creates the
    record when it is first read."""

    told: Record | Later

    @property
    def record(self) -> Record:
        """Return the trace record, which is created on first use."""
        self.told = record = made(self.told)
        return record


@dataclass(slots=True)
class Finished(Event):
    """The output is complete. No further event follows for the output. `text` is text that was held back until now.
    `stop` is the token or the string that ended the output; `error` is the error that ended the output. `is_last` says
    that the whole request has ended. `held` is the time in seconds that the output waited for its controller."""

    reason: FinishReason = FinishReason.STOP
    usage: Usage = field(default_factory=Usage)
    text: str = ""
    stop: int | str | None = None
    error: BridleError | None = None
    is_last: bool = True
    held: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class ToolCall:
    """A function that the model calls. `arguments` is JSON text. The client sends the result of the call back with the
    same `id`."""

    name: str
    id: str
    arguments: str = ""


@dataclass(slots=True)
class ChatMessage:
    """The parsed output of a conversation: the model's reasoning, its text, and the functions that it calls."""

    thoughts: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def _repr_html_(self) -> str:
        """Return the message as HTML for a notebook. Reasoning is pale, and tool calls are below the text."""
        calls = [f"{call.name}({call.arguments})" for call in self.calls]
        thoughts = f"{self.thoughts}\n" if self.thoughts else ""
        return page_of(None, thoughts, ["\n".join(filter(None, [self.content, *calls]))], [0])


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request, finished or still growing. `text` is the whole text of the model. For a conversation,
    `message` is the parsed text after the output has ended. `score` is the score of a beam: the sum of its
    log-probabilities, divided by its length to the power of the length penalty. `seed` is the seed with which a request
    repeats only this output. Beams have no seed. With several outputs, forks of a controller have no seed."""

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
        """Return the text as HTML for a notebook. Only the whole `RequestOutput` shows the origin of its tokens."""
        return page_of(None, "", [self.text], [self.index])


#: Name of the variable with the probabilities of the options of a choice, in their order, and their log-probabilities.
OPTIONS = "bridle.options"


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one request, in the order of their index."""

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
        """Return the text of the first output."""
        return self.outputs[0].text

    def _repr_html_(self) -> str:
        """Return the output as HTML for a notebook. With a trace, tokens are coloured by their origin."""
        texts, indexes = [output.text for output in self.outputs], [output.index for output in self.outputs]
        return page_of(self.trace, self.prompt or "", texts, indexes)

    @property
    def message(self) -> ChatMessage | None:
        """Return the first output of a conversation, split into reasoning, content and tool calls."""
        return self.outputs[0].message

    @property
    def usage(self) -> Usage:
        """Return the counts summed over the outputs; the prompt is counted once."""
        total = Usage()
        for output in self.outputs:
            total.add(output.usage)
        if self.outputs:
            total.prompt_tokens = self.outputs[0].usage.prompt_tokens
            total.cached_tokens = self.outputs[0].usage.cached_tokens
        return total
