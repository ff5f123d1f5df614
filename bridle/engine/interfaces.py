"""The protocols of the engine's neighbours: what computes, what steers, what keeps adapters, and what turns tokens into
text.

The engine is written against these protocols alone. `bridle.model` (torch), `bridle.testing` (scripted) and any other
backend implement `Executor`; plain Python objects, constraints and the Wasm runtime each bring a `ControllerPool`;
`bridle.text` brings `TextDecoder`. No tensor type appears here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, cast, runtime_checkable

from bridle.engine.decision import Decision
from bridle.engine.media import Medium
from bridle.engine.plan import SampleBatch, SampleRow, StepPlan, StepResult
from bridle.engine.request import Request
from bridle.engine.unnamed import NONE_UNNAMED, Unnamed
from bridle.errors import BridleError, ControllerError

#: What a model is for: text, vectors of texts, or labels of texts.
Task = Literal["generate", "embed", "classify"]

# -- computing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the engine must know of a loaded model.

    `kv` says who places KV. With `paged` the engine's block tables do (the plan gives every slot of every position).
    With `sequences` the backend keeps KV by sequence id, copying on `ForkRow` and truncating to each row's `start`; the
    engine then only counts blocks. `capacity` is `num_blocks * block_size` tokens either way. Vectors of an `Embedder`
    have `embedding_size` numbers; 0 if this model gives none. `task` says what the model is for: one that does not
    generate gives vectors of whole texts, each computed in one step, or the logits of a classifier's labels.
    `block_bytes` is the memory of one block; 0 if it is not known. Ids that are `unnamed` stand for no token: they are
    read in prompts, and never drawn.
    """

    model: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv: Literal["paged", "sequences"] = "paged"
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    max_num_batched_tokens: int = 512  # what the backend digests well in one step
    max_num_seqs: int = 256
    embedding_size: int = 0
    task: Task = "generate"
    block_bytes: int = 0
    unnamed: Unnamed = NONE_UNNAMED

    @property
    def num_drawable(self) -> int:
        """Ids from this one on are never drawn."""
        return self.unnamed.end_of(self.vocab_size)


class Executor(Protocol):
    """A backend. One thread calls it. `forward` may return before the device is done; `sample` waits for it."""

    @property
    def info(self) -> ExecutorInfo: ...

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan to the mirrors and start computing its rows. Raises `ShardUnavailable` when the device is lost
        (every mirror is then gone), and any other `BridleError` when this plan cannot be run."""

    def sample(self, batch: SampleBatch) -> StepResult:
        """Read tokens and log-probabilities off the logits of the last forward."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget every mirror and all KV."""

    def close(self) -> None:
        """Release the device. Idempotent."""


class LateExecutor(Executor, Protocol):
    """An executor whose device works on while its caller does other things: `sample` in two parts.

    The caller may launch the next step between the two, with names of the tokens that are being drawn (`name_of`): the
    device has them. It computes such a row with any token where nothing could be drawn. The order is draw, forward or
    none, take; what was drawn and not taken is forgotten with `reset`. Errors of either part may be raised by `take`.
    """

    @property
    def answers_late(self) -> bool:
        """Whether that is of use here; if not, the engine calls `sample` alone."""
        raise NotImplementedError

    def draw(self, batch: SampleBatch) -> None:
        """Begin to read tokens off the logits of the last forward. Returns at once."""

    def take(self) -> StepResult:
        """Wait for the results of the last `draw`. From then on its tokens have no names any more."""
        raise NotImplementedError

    def await_forward(self, seconds: float) -> bool:
        """Wait until the device has computed the last forward, at most so long; returns whether it has."""
        raise NotImplementedError


def find_late(executor: Executor) -> LateExecutor | None:
    """The executor, if it answers late."""
    return cast(LateExecutor, executor) if getattr(executor, "answers_late", False) else None


@runtime_checkable
class Interruptible(Protocol):
    """An executor whose device can go away for a while, and come back without any of its state.

    While the device is away the engine computes nothing and keeps all requests. `on_change` is called, from any thread,
    when it goes away and when it comes back.
    """

    on_change: Callable[[], None]

    @property
    def is_up(self) -> bool:
        """Whether the device is reachable, as far as is known. Safe from any thread."""
        raise NotImplementedError


@runtime_checkable
class Embedder(Protocol):
    """An executor that can also return the vector of a text, unless its `info.embedding_size` is 0."""

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Vectors in 32-bit numbers of these logits rows of the last forward, which was step `step` and has been
        sampled. Those of a model that generates are its hidden states, scaled to length 1."""
        raise NotImplementedError


class Sampler(Protocol):
    """Logits to tokens. `logits` is the backend's `[R, V]` array; `history(row)` gives the tokens that precede a
    row's draw and how many of them are prompt. Row i of the result answers `batch.rows[i]`."""

    def __call__(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> StepResult: ...


class Drawing(Protocol):
    """Draws that are under way."""

    @property
    def tokens(self) -> Any:
        """The tokens as the device has them, an integer tensor [rows] in the order of the batch, less than 0 where none
        could be drawn; None if they have to be waited for."""
        raise NotImplementedError

    def take(self) -> StepResult:
        """Wait for them. Called once."""
        raise NotImplementedError


@runtime_checkable
class EarlySampler(Sampler, Protocol):
    """A sampler that need not be waited for. To call it is to `draw`, and to `take` at once."""

    def draw(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> Drawing:
        """Start answering `batch`. When this returns, whatever is launched next may overwrite `logits`."""
        raise NotImplementedError


class HistoryLookup(Protocol):
    def __call__(self, row: SampleRow) -> tuple[Sequence[int], int]: ...


# -- steering ----------------------------------------------------------------------------------------------


@dataclass(slots=True)  # not frozen, since one is made for each token; nobody changes it
class Ask:
    """Tokens of a sequence just became known: what next?

    `tokens` were appended after `backtrack` older ones were taken back; `sampled` is the token that was drawn, even if
    a splice replaced it; `candidates` are the likeliest tokens of that draw with their log-probabilities, if its branch
    wanted them. The first ask of a request names `request`, that of a fork its `parent` (which is in the same call),
    its `branch` number, counted from 1, and its `index` among the request's outputs. The first `num_foreseen` of the
    tokens were drawn one after the other, each as the pool foresaw it after the one before. A `final` ask wants no
    decision, only last logs. `turns` is how often in a row a controller that does nothing may be asked at once. Where
    it may not force tokens, because another controller does not allow them, it is asked for what else it allows.
    `variables` are set before it is asked, where the pool of its kind has variables. `ahead` are tokens that are likely
    to be drawn next, for a pool that `is_told_ahead`.
    """

    seq_id: int
    tokens: tuple[int, ...] = ()
    backtrack: int = 0
    sampled: int | None = None
    candidates: tuple[tuple[int, float], ...] | None = None
    request: Request | None = None
    parent: int | None = None
    branch: int | None = None
    index: int = 0
    final: bool = False
    turns: int = 1
    num_foreseen: int = 0
    may_force: bool = True
    variables: tuple[tuple[str, bytes], ...] = ()
    ahead: tuple[int, ...] = ()


class StoredValue(NamedTuple):
    """A shared variable that a controller wrote, or to which it appended `value`."""

    name: str
    value: bytes
    is_append: bool = False


@dataclass(slots=True)
class Answer:
    """The answer of a controller. Exactly one of `decision` and `error` is set, except for a final ask. `turns` is how
    often the controller was asked for it. `ahead` is for the pool itself: tokens that may come, and what it would
    answer after each."""

    decision: Decision | None = None
    error: ControllerError | None = None
    log: str = ""
    stored: tuple[StoredValue, ...] = ()
    turns: int = 1
    ahead: tuple[tuple[int, Answer], ...] = ()


class ControllerPool(Protocol):
    """Runs controllers of one kind. Called by the engine thread, except for `abandon`. No call but
    `collect` may block."""

    @property
    def is_busy(self) -> bool:
        """Whether the pool has messages to send or to receive although nothing was asked, so that `collect` must be
        called again. False, plainly, for a pool that never has."""
        raise NotImplementedError

    def accepts(self, controller: object) -> bool:
        """Whether this pool runs controllers of this kind."""
        raise NotImplementedError

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Make an instance for a request. The future gives the prompt, which a controller may rewrite, or
        raises `ControllerError`. A future that could be cancelled leaves no instance behind."""
        raise NotImplementedError

    def abandon(self, request: Request) -> None:
        """Drop the instance that was opened for `request`, which will never be asked anything. Called after its opening
        is done, perhaps from another thread."""

    def ask(self, asks: Sequence[Ask]) -> None:
        """Send the asks. Callbacks may start now; the answers are due at the next logits row of each sequence."""

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """The answers that have arrived, of any asked sequence. Waits until those of `seq_ids` are there, or until
        `deadline` (engine clock, None: do not wait) has passed. Each answer is returned once."""
        raise NotImplementedError

    def close(self, seq_ids: Sequence[int]) -> None:
        """Drop the instances of these sequences, which are over. Unknown ids are ignored."""

    def shutdown(self) -> None:
        """End all controllers, and what runs them. Idempotent."""


@runtime_checkable
class ModulePool(Protocol):
    """A `ControllerPool` whose controllers are modules with names, which may mean another module tomorrow."""

    def modules_of(self, request: Request) -> tuple[tuple[str, str], ...]:
        """The names by which a request's controllers were asked for, and the hashes of the modules that were made of
        them. Asked once its opening is done, and before it is first asked anything."""
        raise NotImplementedError


@runtime_checkable
class ForesightedPool(Protocol):
    """A `ControllerPool` that can say ahead what it would answer, for controllers whose `is_pure`, if they have such an
    attribute, is true."""

    def foresee(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        """What the controller would answer after each of `tokens`, if they came next: as far as these are draws, and
        quickly known. It may also force tokens that come next among them; then its next answer is that to the last of
        these. Nothing changes for the controller until tokens are reported as foreseen. Asked for a sequence whose last
        answer was collected."""
        raise NotImplementedError

    def take_words(self, seq_id: int, num_tokens: int) -> Answer | None:
        """What the controller said beside what it answered ahead to the last of so many of the tokens, which were drawn
        now: log and variables. It is returned once; the answer to those tokens leaves it out."""


@runtime_checkable
class GuidingPool(ForesightedPool, Protocol):
    """One that says before a step how drafts are to be drawn."""

    def guide(self, seq_id: int, tokens: Sequence[int]) -> Decision | None:
        """What the controller would answer after all of `tokens`, if they came next; None if that is not quickly known.
        Nothing changes for the controller. While a draft is made it is asked after each of its tokens."""
        raise NotImplementedError


@runtime_checkable
class LeadingPool(GuidingPool, Protocol):
    """One that says before a step which tokens may be drafted."""

    def lead(self, seq_id: int, tokens: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
        """Those of `tokens` that are allowed after one another, each with the tokens that are then forced, as far as
        draws follow; and whether others are forced than those that come next in `tokens`. Asked again, it goes on from
        there."""
        raise NotImplementedError


@runtime_checkable
class ForetoldPool(ForesightedPool, Protocol):
    """One that foresees only what it was told `ahead`, together with an ask: its controllers are far away."""

    @property
    def is_told_ahead(self) -> bool:
        """Whether it makes use of that now."""
        raise NotImplementedError


def foresees(pool: object) -> TypeGuard[ForesightedPool]:
    """Whether a pool is one, at a glance: what `isinstance` finds out about protocols takes long beside a step."""
    return hasattr(pool, "foresee")


def guides(pool: object) -> TypeGuard[GuidingPool]:
    """Whether a pool is one, at a glance."""
    return hasattr(pool, "guide")


def leads(pool: object) -> TypeGuard[LeadingPool]:
    """Whether a pool is one, at a glance."""
    return hasattr(pool, "lead")


def is_foretold(pool: object) -> TypeGuard[ForetoldPool]:
    """Whether a pool is one, at a glance."""
    return hasattr(pool, "is_told_ahead")


# -- adapting ----------------------------------------------------------------------------------------------


class AdapterStore(Protocol):
    """Keeps a model's adapters, by key (`Request.adapter`). None of its calls may block. The engine's thread calls all
    but `check_known`."""

    def check_known(self, key: str) -> None:
        """Raise `UnknownAdapter` unless requests may use the adapter. Any thread may ask."""

    def open(self, key: str) -> None:
        """Note that a request uses the adapter from now on. Raises `UnknownAdapter`."""

    def leave(self, key: str) -> None:
        """Note that a request that used the adapter is over."""

    def begin_step(self, keys: Sequence[str]) -> set[str]:
        """Return the adapters among `keys`, the most urgent first, that are on the device; they stay there until the
        next call. The others are brought there meanwhile."""
        raise NotImplementedError

    def take_failures(self) -> dict[str, BridleError]:
        """Adapters in use that cannot be loaded, and why; each is returned once."""
        raise NotImplementedError

    def counts(self) -> Mapping[str, int]:
        """How many adapters are on each tier, and how many came and went: fields of `EngineStatistics`. Any thread may
        ask."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop bringing adapters to the device. Idempotent."""


# -- seeing ------------------------------------------------------------------------------------------------


class MediaDevice(Protocol):
    """What an executor that sees has as `media`: it encodes pictures, and holds their features by key until it is told
    to drop them. `encode` and `drop` are called by one thread, beside the steps; each raises `ShardUnavailable` when
    the device cannot be reached. `epoch` is another number after everything was lost."""

    epoch: int
    max_bytes: int

    def num_bytes(self, medium: Medium) -> int:
        """The memory that its features take."""
        raise NotImplementedError

    def encode(self, medium: Medium) -> None:
        """Make the features of a picture; returns when plans may name them. Raises `MediaRefused`."""

    def drop(self, key: bytes) -> None:
        """Let go of the features of a picture that no plan names; unknown keys are ignored."""

    def clear(self) -> None:
        """Let go of all features, also of those that are being made."""


@runtime_checkable
class BatchedMedia(MediaDevice, Protocol):
    """A device that may encode several pictures at once."""

    def together(self, media: Sequence[Medium]) -> list[Medium]:
        """The first of `media` and those behind it that it would best be encoded with."""
        raise NotImplementedError

    def encode_all(self, media: Sequence[Medium]) -> None:
        """Make the features of pictures that belong `together`. After an error none of them are there: then each is to
        be encoded for itself."""


class MediaStore(Protocol):
    """Encodes pictures and keeps their features where the model computes, by key. None of its calls may block. The
    engine's thread calls all but `check` and `counts`."""

    def check(self, media: Sequence[Medium]) -> None:
        """Raise `InvalidRequest` for a picture that can never be encoded here, and `Overloaded` where there is no room
        for it now. Any thread may ask."""

    def open(self, medium: Medium) -> None:
        """Note that a request uses the medium from now on."""

    def leave(self, key: bytes) -> None:
        """Note that a request that used the medium is over."""

    def begin_step(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the media among `keys`, the most urgent first, whose features are there; they stay until the next
        call. Others are encoded meanwhile, the first of them in any case."""
        raise NotImplementedError

    def take_failures(self) -> Mapping[bytes, BridleError]:
        """Media in use that cannot be encoded, and why; each is returned once."""
        raise NotImplementedError

    def counts(self) -> Mapping[str, Any]:
        """Fields of `EngineStatistics`. Any thread may ask."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop encoding. Idempotent."""


# -- spelling ----------------------------------------------------------------------------------------------


class TextState(Protocol):
    """The text of one growing output. It is copied on a fork."""

    def push(self, token: int) -> str:
        """Append a token; returns the characters that became certain."""
        raise NotImplementedError

    def rewind(self, num_tokens: int) -> int:
        """Take the last tokens back; returns how many of the returned characters disappear."""
        raise NotImplementedError

    def flush(self) -> str:
        """End the text; returns what is left (an unfinished character becomes U+FFFD)."""
        raise NotImplementedError

    def copy(self) -> TextState: ...


class TextDecoder(Protocol):
    """Tokens to text."""

    def open(self, prompt: Sequence[int], skip_special_tokens: bool) -> TextState:
        """State for output that follows `prompt`."""
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        """What a token spells by itself, for people to read."""
        raise NotImplementedError

    def tokens_of(self, text: str) -> Sequence[int]:
        """Tokens that spell `text` inside of an output."""
        raise NotImplementedError
