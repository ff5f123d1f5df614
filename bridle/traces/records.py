"""Records of a trace: first the header with the request, then one record for each event of an output, in order. A trace
has the origin of each token, so that a text can be explained, shown and repeated. A trace shows what the engine did. A
trace includes tokens that the client never received, because they were rolled back in the same step. Records are plain
data; `bridle.traces` writes them to files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

#: The version of the format. The version changes when a reader of the old version would misread the new one.
VERSION = 1
#: Maximum number of records of one request, forks included. Later ones are only counted.
MAX_RECORDS = 1 << 16
#: Maximum number of records of all requests that are traced at one time. Later ones are only counted.
MAX_LIVE_RECORDS = 1 << 19
#: Maximum number of bytes of a file of exchanges with a control runtime. Later exchanges are only counted.
MAX_EXCHANGES_BYTES = 1 << 30
#: Maximum number of characters of logs and bytes of variables in the records of one request.
MAX_SAID = 1 << 20
#: Number of best tokens that are recorded of a distribution, before and after mask and bias.
NUM_CANDIDATES = 5
#: Maximum number of biases that are recorded of one sampled token.
MAX_BIASES = 16


@dataclass(slots=True)
class Odds:
    """The log-probability and rank of a sampled token in one distribution, and the most probable tokens of that
    distribution, best first."""

    logprob: float
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
    texts: tuple[str, ...] = ()  # of `top`


@dataclass(slots=True)
class Draw:
    """The distributions behind a sampled token. `before` is the distribution of the model itself; `after` is the one
    after mask and bias (None: mask and bias changed nothing). `num_allowed` is the number of allowed tokens (None:
    all). `taken` is the probability of the forbidden tokens in the model's own distribution."""

    before: Odds
    after: Odds | None = None
    num_allowed: int | None = None
    taken: float = 0.0

    @property
    def odds(self) -> Odds:
        """Return the distribution from which the token was sampled, before temperature and truncation."""
        return self.before if self.after is None else self.after

    @property
    def gap(self) -> float | None:
        """Return the log-probability of the most probable token minus that of the second one; None if it is unknown."""
        top = self.odds.top
        return top[0][1] - top[1][1] if len(top) > 1 else None


@dataclass(slots=True)
class Cost:
    """One step of the engine: the numbers of sequences and tokens, and three durations in seconds. The durations are
    those of the forward pass, of the wait for controllers, and of sampling (which waits for the device)."""

    num_rows: int
    num_tokens: int
    forward: float
    wait: float
    sample: float


# -- records -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Record:
    """An event of output `output`, in step `step` of the engine."""

    output: int
    step: int


@dataclass(slots=True)
class PromptRecord(Record):
    """The prompt was computed. The first `num_cached` tokens of the prompt were found in the cache. `queued` is the
    time in seconds that the request waited for room. `opening` is the time in seconds to start the request's
    controller."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_cached: int = 0
    queued: float = 0.0
    opening: float = 0.0


@dataclass(slots=True)
class ChunkRecord(Record):
    """Tokens from position `start` on were computed; `num_again` of them had already been computed before. A token is
    computed again if its KV was lost by a preemption or with the device, or if its logits are needed again."""

    start: int = 0
    num_tokens: int = 0
    num_again: int = 0
    cost: Cost | None = None


@dataclass(slots=True)
class TokenRecord(Record):
    """One more token of the output, at position `at`. `text` is the text that became final with this token; `spelled`
    is the text of the token alone. The token was sampled, or it was forced by the controller that `by` names. `answer`
    is the time in seconds that the controller took to answer since the last token. A token with `drafted` was computed
    before it was sampled."""

    at: int = 0
    token: int = 0
    text: str = ""
    spelled: str = ""
    forced: bool = False
    by: str | None = None
    drafted: bool = False
    draw: Draw | None = None
    biases: tuple[tuple[int, float | None], ...] = ()  # biases of this sample, at most MAX_BIASES; None forbids
    num_biases: int = 0
    answer: float = 0.0
    cost: Cost | None = None


@dataclass(slots=True)
class ReplacedRecord(Record):
    """A token was sampled, but a splice replaced it before it became part of the output."""

    token: int = 0
    spelled: str = ""
    by: str | None = None
    draw: Draw | None = None


@dataclass(slots=True)
class RewindRecord(Record):
    """The last `num_tokens` tokens and `num_chars` characters are rolled back, and then also `num_prompt` tokens of the
    prompt."""

    num_tokens: int = 0
    num_chars: int = 0
    num_prompt: int = 0
    by: str | None = None


@dataclass(slots=True)
class ForkRecord(Record):
    """The output began as a copy of output `parent`, which had `num_tokens` tokens at that time."""

    parent: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class WaitRecord(Record):
    """The output was waiting for `num_steps` steps, and now continues. `late` says that the controller was late with
    its answer. If `late` is False, the output waited on purpose; `variables` names the variables that it waited for."""

    late: bool = False
    variables: tuple[str, ...] = ()
    num_steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class LogRecord(Record):
    """The controller printed text."""

    text: str = ""


@dataclass(slots=True)
class StoredRecord(Record):
    """The controller set a variable, or appended to it."""

    name: str = ""
    value: bytes = b""
    is_append: bool = False


@dataclass(slots=True)
class ExchangeRecord(Record):
    """A `request` from an engine to its control runtime and, `seconds` later, the `reply`. The exchange used the main
    channel, or with `side` the side channel. Request and reply are JSON values, or strings if they were not JSON. `at`
    is the time of the request, in seconds since 1970. An exchange concerns many outputs, so its `output` is 0. `step`
    counts exchanges."""

    at: float = 0.0
    seconds: float = 0.0
    side: bool = False
    request: Any = None
    reply: Any = None


@dataclass(slots=True)
class EndRecord(Record):
    """The output is complete. `text` is the text that was held back until now. `stop` or `error` says why the output
    ended. `num_cut` is the number of records that are missing, because the request had too many. `modules` are the
    names of the request's Wasm controllers, each with the hash that its module had at the start. Only the trace of the
    first output has these names. `constraint` is the probability that constraints removed, as in `usage.constraint`."""

    reason: str = ""
    text: str = ""
    stop: int | str | None = None
    error: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    constraint: dict[str, Any] | None = None
    num_cut: int = 0
    modules: tuple[tuple[str, str], ...] = ()


#: All kinds of records, by their names in files and streams.
KINDS: dict[str, type[Record]] = {
    "prompt": PromptRecord,
    "chunk": ChunkRecord,
    "token": TokenRecord,
    "replaced": ReplacedRecord,
    "rewind": RewindRecord,
    "fork": ForkRecord,
    "wait": WaitRecord,
    "log": LogRecord,
    "variable": StoredRecord,
    "exchange": ExchangeRecord,
    "end": EndRecord,
}


# -- traces --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TraceHeader:
    """The request of a trace, with everything that is needed to repeat it. `sampling` has the parameters that differ
    from their defaults, and always the seed. `controller` is the stored form of the controller, or only its name if it
    is code of one process. `chat_format` says how the model writes tool calls and reasoning, if this is known. The
    trace of a control `runtime` has the settings with which the runtime started, and then only exchanges."""

    request_id: str
    version: int = VERSION
    model: str = ""
    prompt: list[int] = field(default_factory=list)
    text: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    controller: dict[str, Any] | None = None
    adapter: str | None = None
    num_media: int = 0  # number of images, which a trace does not contain
    engine: dict[str, Any] = field(default_factory=dict)
    chat_format: dict[str, Any] | None = None
    runtime: dict[str, Any] | None = None
    bridle: str = ""
    made: str = ""


#: A record that is made when it is read: a function and its arguments. So records that are never read cost no time in
#: steps.
Later = tuple[Callable[..., Record], *tuple[Any, ...]]


class Trace:
    """The trace of one request."""

    __slots__ = ("_ends", "_later", "_made", "header")

    def __init__(self, header: TraceHeader, records: Iterable[Record | Later] = ()) -> None:
        self.header = header
        self._made: list[Record] = []
        # Unmade records are kept in one flat list, because the garbage collector would visit a tuple for each again and
        # again.
        self._later: list[Any] = []
        self._ends: list[int] = []
        for record in records:
            self.add(record)

    def add(self, record: Record | Later) -> None:
        """Add the next record."""
        if isinstance(record, tuple):
            self._later += record
        else:
            self._later.append(record)
        self._ends.append(len(self._later))

    @property
    def records(self) -> list[Record]:
        """Return the records in order."""
        later, ends, self._later, self._ends = self._later, self._ends, [], []
        for start, end in zip([0, *ends], ends, strict=False):
            told = later[start:end]
            self._made.append(told[0] if len(told) == 1 else made(tuple(told)))
        return self._made

    @property
    def num_records(self) -> int:
        """Return the number of records."""
        return len(self._made) + len(self._ends)

    @property
    def num_cut(self) -> int:
        """Return the number of missing records."""
        return max((record.num_cut for record in self.records if isinstance(record, EndRecord)), default=0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and (self.header, self.records) == (other.header, other.records)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Trace({self.header!r}, {self.records!r})"

    def __reduce__(self) -> tuple[type[Trace], tuple[TraceHeader, list[Record]]]:
        return Trace, (self.header, self.records)


def made(record: Record | Later) -> Record:
    """Return the record, which is created now if necessary."""
    if isinstance(record, Record):
        return record
    make, *given = record
    return make(*given)
