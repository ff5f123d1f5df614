"""The state of a sequence apart from its tokens, in parts. Each part has one owner, and only the owner writes it.

Every component may read them. They are plain data; values that follow from several parts are computed by `Sequence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from bridle.engine.control.decision import DRAW, Awaited, Decision
from bridle.engine.guardrails.guardrails import GuardrailMatch
from bridle.engine.interfaces import Ask, Change, ControllerPool
from bridle.engine.outputs.aligned import AlignedSampling
from bridle.engine.outputs.constraint_meter import ConstraintMeter, ForcedRun
from bridle.engine.outputs.stop_strings import OutputText
from bridle.engine.spec_decode.step_cost import AcceptanceRate
from bridle.outputs import FinishReason, Logprob, TokenEvent, Usage
from bridle.traces import MAX_RECORDS, MAX_SAID, Draw, WaitRecord


class SequenceStatus(Enum):
    """State of a sequence in the scheduler."""

    OPENING = auto()  # its controller is being made
    WAITING = auto()  # holds no blocks
    RUNNING = auto()  # holds blocks
    FINISHED = auto()


@dataclass(slots=True)
class PendingToken:
    """A token whose event waits for its log-probability."""

    token: int
    text: str
    forced: bool


@dataclass(slots=True)
class QueueState:
    """The sequence's state in the scheduler's queues, and its times there.

    Written by `SequenceQueues`; `adapter_not_scheduled` is written by `LoRAScheduler`, which chooses the adapters of a
    step, `num_passes` by `PromptShares`, and `awaits_kv` by `StoredBlocks`.
    """

    level: int  # of urgency, smaller ones first: its request's, until it overtakes a higher one
    status: SequenceStatus = SequenceStatus.OPENING
    adapter_not_scheduled: bool = False  # its adapter is not in the step under way
    num_passes: int = 0  # sequences that took room for which it waits
    awaits_media: bool = False  # what comes next is a picture that is not encoded; written by `EncoderScheduler`
    awaits_kv: bool = False  # its next blocks are being read from the store
    queued_at: float | None = None  # of the engine's clock
    seconds: float | None = None  # until it was first given room


class SaveKind(IntEnum):
    """The reason for which a copy of a recurrent state is kept, in the order in which copies are evicted: the first two
    kinds go before the others."""

    PERIODIC = 0  # within a long prompt
    TAIL = 1  # at a block that a sequence has filled, and went on
    PROMPT = 2  # at the last full block of a prompt
    JUNCTION = 3  # where a prompt leaves a chain of cached blocks
    END = 4  # at the last full block of a sequence that ended or was preempted
    BASE = 5  # before a row's drafts: the sequence's own, and never evicted


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A copy, in slot `slot`, of a sequence's recurrent state after its first `position` tokens."""

    position: int
    slot: int
    kind: SaveKind


@dataclass(slots=True)
class RecurrentSlots:
    """A sequence's state in a model with recurrent layers. Written by `StateManager`.

    `slot` holds the state after `position` tokens, drafts included; -1 if it has none. `pending` are the copies that
    the current step makes, and `base` is the copy from before its draft tokens. `tail` is the hash of the sequence's
    own newest copy. At `junction` tokens other sequences may continue differently; 0 if no such place is known.
    """

    slot: int = -1
    position: int = 0
    pending: list[SavedSlot] = field(default_factory=list)
    base: SavedSlot | None = None
    tail: bytes | None = None
    junction: int = 0


@dataclass(slots=True)
class KvState:
    """Number of computed tokens, their blocks, and the state of the executor's mirror.

    Written by the scheduler, the block manager, the state manager and `StoredBlocks`.
    """

    num_computed: int = 0
    is_prefilling: bool = False  # not all tokens have been computed since it was given room
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of `tokens`, as far as known
    num_shared: int = 0  # first of these hashes that a group of users shares
    num_hashed: int = 0  # blocks of the table that were offered to the prefix cache
    num_cached: int = 0  # tokens of the prompt that came from there when it was first computed
    num_retained: int = 0  # tokens that stay protected after the end, as the request asked
    is_looked_up: bool = False  # whether its blocks were searched in the store
    num_in_reach: int = 0  # first blocks that memory or the store had then, in a model with recurrent layers
    num_mirrored_tokens: int = 0
    num_mirrored_blocks: int = 0
    recurrent: RecurrentSlots | None = None  # None in models without recurrent layers

    def fork(self) -> KvState:
        """Return the state of a fork, without its blocks."""
        return KvState(
            num_computed=self.num_computed,
            block_hashes=self.block_hashes.copy(),
            num_shared=self.num_shared,
            num_hashed=self.num_hashed,
        )

    def forget(self) -> None:
        """Record that no KV is left, so that everything is computed again."""
        self.num_computed = self.num_mirrored_blocks = self.num_hashed = self.num_in_reach = 0
        self.is_looked_up = False


@dataclass(slots=True)
class ControlState:
    """Asks to the sequence's controller, and its answers.

    Written by `ControllerOpenings`, which makes controllers, and by `ControllerManager` and `ControllerOutputs`, which
    ask and hear them.
    """

    pool: ControllerPool | None = None  # where the controller lives
    max_moves: int = 1 << 62
    num_moves: int = 0  # draws and splices
    awaits_answer: bool = False
    answer: Decision | None = None  # arrived, not applied yet
    pending_ask: Ask | None = None  # what to tell it next
    pending_token: int | None = None  # all that there is to tell, if that is a sampled token; then there is no ask
    asked_round: int = 0  # the round in which it was asked last
    missed_deadline: bool = False  # missed a step: not computed until it answers
    is_suspended: bool = False  # it said wait
    awaited: tuple[Awaited, ...] = ()  # for these alone
    final_ask_sent: bool = False  # it was told that this is the end
    num_idle_steps: int = 0
    opened_at: float | None = None  # when it was asked for; all times are of the engine's clock
    opening_seconds: float = 0.0  # until it was made
    held_at: float = 0.0  # the last step in which it held the sequence up
    held_seconds: float = 0.0  # that it did so, so far
    spliced_at: int = -1  # how many tokens there were after the last splice
    num_told: int = 0  # how many tokens it was told of,
    num_kept: int = 0  # how many of those are still there; written by the sequence, too
    log_tail: str = ""  # the end of what its controllers have printed, if a policy holds for it

    @property
    def just_draws(self) -> bool:
        """Return whether the controller has said in time that the next token is sampled as usual."""
        return self.answer is DRAW and not self.num_idle_steps and self.num_moves < self.max_moves

    @property
    def is_parked(self) -> bool:
        """Return whether it waits for things outside of the engine, and none of them is done."""
        return self.is_suspended and bool(self.awaited) and not any(each.is_done for each in self.awaited)

    def clear_hold(self) -> None:
        """Record that the sequence no longer waits for its controller."""
        self.missed_deadline = self.is_suspended = False


@dataclass(slots=True)
class SamplerState:
    """Counts of random numbers and of forks. Written by `SamplePlanner`.

    `mus` are the states of Mirostat, each with the number of tokens that the sequence had by then. `is_plain` says that
    its sampling parameters alone decide how a token is sampled, apart from bans and its controller's decision.
    """

    num_draws: int = 0
    num_forks: int = 0
    mus: list[tuple[int, float]] = field(default_factory=list)
    was_forked: bool = False  # the request's own n outputs exist
    is_plain: bool = False


@dataclass(slots=True)
class Proposal:
    """Tokens that a controller has proposed after the first `at` tokens. The first `num_true` of them were right."""

    at: int
    tokens: tuple[int, ...]
    num_true: int = 0


@dataclass(slots=True)
class DraftState:
    """Recent acceptance rates of drafts by source. Written by `Speculation` and `ProposerSelector`."""

    proposed: AcceptanceRate = field(default_factory=AcceptanceRate)
    copied: AcceptanceRate = field(default_factory=AcceptanceRate)
    modelled: AcceptanceRate = field(default_factory=AcceptanceRate)
    #: Of the parts of the drafts of the step under way: a guess, and what is forced after it.
    sizes: tuple[int, ...] = ()
    proposal: Proposal | None = None  # the latest, as long as it comes true
    source: AcceptanceRate | None = (
        None  # that of the drafts of the step under way; None: `copied`, since there were none yet
    )
    foretold: tuple[int, ...] | None = None  # what a controller that is far away was told ahead; None: there is no such
    chance: float = 0.0  # that each of these is right if those before it are
    watched: tuple[int, int] | None = None  # a place, and the token that was guessed to come there and not computed


@dataclass(slots=True)
class TraceBudget:
    """Budget for recording a request over all outputs: the remaining bytes, and the counts of kept and dropped
    records."""

    most_records: int = MAX_RECORDS
    num_said: int = MAX_SAID
    num_cut: int = 0
    num_records: int = 0


#: Of a traced draw: its bias, whether the token was drafted, what the rows of its step drew from, and which is its own.
Drawn = tuple[tuple[tuple[int, float], ...], bool, Sequence[Draw | None], int]
#: Of a token that was not sampled.
NO_DRAW: Drawn = ((), False, (), 0)


@dataclass(slots=True)
class TraceState:
    """State of the next record of a traced sequence. Written by `TraceRecorder`."""

    room: TraceBudget
    by: str | None  # what steers it
    num_seen: int = 0  # tokens that went through the model, as far as they were not rolled back
    drawn: Drawn = NO_DRAW  # the draw under way
    asked_at: float | None = None
    answered: float = 0.0  # seconds that its controller took since the last token
    wait: WaitRecord | None = None  # the wait under way
    waits_since: float = 0.0
    modules: tuple[tuple[str, str], ...] = ()  # names of controllers, and what they meant

    def fork(self) -> TraceState:
        """Return the state of a copy, which shares the budget."""
        return TraceState(self.room, self.by, self.num_seen)


@dataclass(slots=True)
class OutputState:
    """Text and tokens sent to the client and still to send, and counts. Written by `OutputProcessor` and its
    helpers."""

    text: OutputText | None = None
    unsent: list[PendingToken] = field(default_factory=list)
    held: list[TokenEvent] = field(default_factory=list)  # whose text may still have to go
    bans: dict[int, set[int]] = field(default_factory=dict)  # by position: tokens that lead to a banned phrase
    num_banned: int = 0  # the last tokens, which say what is forbidden and must go
    hit: GuardrailMatch | None = None  # the rule of an operator because of which they must
    num_retries: int = 0  # since text was last released
    changes: list[Change] = field(default_factory=list)  # that its controller was not told of
    prompt_sent: bool = False
    num_scored: int = 0  # tokens whose log-probability is known or not wanted
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)
    ending: tuple[FinishReason, int | str | None] | None = None  # finish once every token is scored
    meter: ConstraintMeter | None = None  # None: not requested
    aligned: AlignedSampling | None = None  # None: what a mask leaves is sampled
    unlikely: ForcedRun | None = None  # a run below the floor, about which nothing was done yet
    usage: Usage = field(default_factory=Usage)
