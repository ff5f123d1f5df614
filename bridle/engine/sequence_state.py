"""The state of a sequence apart from its tokens, in several parts. Each part has one owner, and only the owner writes
it.

All components may read every part of the state. The state parts are plain data. `Sequence` computes the values that
depend on several parts.
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
    """The phase of a sequence in the scheduler: its controller is being created, or it is waiting, running or
    finished."""

    OPENING = auto()  # the controller is being created
    WAITING = auto()  # holds no blocks
    RUNNING = auto()  # holds blocks
    FINISHED = auto()


@dataclass(slots=True)
class PendingToken:
    """A token that is not sent yet, because its log-probability is missing."""

    token: int
    text: str
    forced: bool


@dataclass(slots=True)
class QueueState:
    """The state of a sequence in the scheduler's queues, and its times there.

    `SequenceQueues` writes this state. But `LoRAScheduler` writes `adapter_not_scheduled`, `PromptShares` writes
    `num_passes`, and `StoredBlocks` writes `awaits_kv`.
    """

    level: int  # urgency, smaller first: the request's, until the sequence overtakes a higher one
    status: SequenceStatus = SequenceStatus.OPENING
    adapter_not_scheduled: bool = False  # its adapter is not in the current step
    num_passes: int = 0  # sequences that took room that this one waits for
    awaits_media: bool = False  # the next token belongs to an image that is not encoded; written by `EncoderScheduler`
    awaits_kv: bool = False  # the next blocks are being read from the store
    queued_at: float | None = None  # time of the engine's clock
    seconds: float | None = None  # seconds until the sequence first got blocks


class SaveKind(IntEnum):
    """The reason why a copy of a recurrent state is kept. The reasons are in the order in which copies are evicted.
    Copies of the first two kinds are evicted before all others."""

    PERIODIC = 0  # within a long prompt
    TAIL = 1  # at a block that a sequence filled before it continued
    PROMPT = 2  # at the last full block of a prompt
    JUNCTION = 3  # where a prompt leaves a chain of cached blocks
    END = 4  # at the last full block of a sequence that ended or was preempted
    BASE = 5  # before a row's draft tokens: used by its sequence only, and never evicted


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A copy of a sequence's recurrent state, after the first `position` tokens, in slot `slot`."""

    position: int
    slot: int
    kind: SaveKind


@dataclass(slots=True)
class RecurrentSlots:
    """The recurrent state of a sequence, in a model with recurrent layers. Written by `StateManager`.

    `slot` has the state after `position` tokens, including draft tokens; -1 means that the sequence has no slot.
    `pending` are the copies that the current step makes; `base` is the copy of the state before the draft tokens.
    `tail` is the hash of the newest copy that the sequence itself made. After `junction` tokens other sequences may
    continue differently (0: no such position is known).
    """

    slot: int = -1
    position: int = 0
    pending: list[SavedSlot] = field(default_factory=list)
    base: SavedSlot | None = None
    tail: bytes | None = None
    junction: int = 0


@dataclass(slots=True)
class KvState:
    """The number of computed tokens, their blocks, and what the executor's copy (mirror) of the sequence contains.

    The scheduler, the block manager, the state manager and `StoredBlocks` write this state.
    """

    num_computed: int = 0
    is_prefilling: bool = False  # some tokens were not computed since the sequence got blocks
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # hashes of the full blocks of `tokens`, as far as known
    num_shared: int = 0  # number of first hashes that a group of users shares
    num_hashed: int = 0  # number of blocks that were added to the prefix cache
    num_cached: int = 0  # prompt tokens found in the cache when the prompt was first computed
    num_retained: int = 0  # tokens that stay protected after the end, as the request asked
    is_looked_up: bool = False  # whether the store was searched for the blocks
    # first blocks found in memory or in the store by that search, in a model with recurrent layers
    num_in_reach: int = 0
    num_mirrored_tokens: int = 0
    num_mirrored_blocks: int = 0
    recurrent: RecurrentSlots | None = None  # None in models without recurrent layers

    def fork(self) -> KvState:
        """Return the state of a fork, without blocks."""
        return KvState(
            num_computed=self.num_computed,
            block_hashes=self.block_hashes.copy(),
            num_shared=self.num_shared,
            num_hashed=self.num_hashed,
        )

    def forget(self) -> None:
        """Record that the sequence has no KV any more. All tokens of the sequence must then be computed again."""
        self.num_computed = self.num_mirrored_blocks = self.num_hashed = self.num_in_reach = 0
        self.is_looked_up = False


@dataclass(slots=True)
class ControlState:
    """Asks to the controller of the sequence, and the controller's answers.

    `ControllerOpenings` creates controllers. `ControllerManager` and `ControllerOutputs` send the asks and process the
    answers.
    """

    pool: ControllerPool | None = None  # runs the controller
    max_moves: int = 1 << 62
    num_moves: int = 0  # samples and splices so far
    awaits_answer: bool = False
    answer: Decision | None = None  # arrived, not applied yet
    pending_ask: Ask | None = None  # the next ask
    pending_token: int | None = None  # a sampled token that is the only news; replaces `pending_ask`
    asked_round: int = 0  # the round of the last ask
    missed_deadline: bool = False  # answer is late: not computed until it arrives
    is_suspended: bool = False  # the decision was to wait
    awaited: tuple[Awaited, ...] = ()  # the only events that end the wait
    final_ask_sent: bool = False  # the last ask, for logs, was sent
    num_idle_steps: int = 0
    opened_at: float | None = None  # when the creation of the controller began; all times are of the engine's clock
    opening_seconds: float = 0.0  # seconds that creating the controller took
    held_at: float = 0.0  # last step in which the controller held up the sequence
    held_seconds: float = 0.0  # total seconds of such steps
    spliced_at: int = -1  # number of tokens after the last splice
    num_told: int = 0  # number of tokens reported to the controller
    num_kept: int = 0  # how many of these tokens still exist; written by the sequence too
    log_tail: str = ""  # end of the controllers' logs, if a policy applies to them

    @property
    def just_draws(self) -> bool:
        """Return whether the controller answered in time, so that the next token is sampled as usual."""
        return self.answer is DRAW and not self.num_idle_steps and self.num_moves < self.max_moves

    @property
    def is_parked(self) -> bool:
        """Return whether the controller waits for events outside of the engine and none of them has happened yet."""
        return self.is_suspended and bool(self.awaited) and not any(each.is_done for each in self.awaited)

    def clear_hold(self) -> None:
        """Record that the sequence no longer waits for its controller."""
        self.missed_deadline = self.is_suspended = False


@dataclass(slots=True)
class SamplerState:
    """The number of random numbers that a sequence has used, and the number of its forks. Written by `SamplePlanner`.

    Each of `mus` is a number of tokens of the sequence, and the state of Mirostat after these tokens. `is_plain` says
    that the sampling parameters alone decide how a token is sampled. Bans and decisions of the controller are not
    considered.
    """

    num_draws: int = 0
    num_forks: int = 0
    mus: list[tuple[int, float]] = field(default_factory=list)
    was_forked: bool = False  # the request's own n outputs exist
    is_plain: bool = False


@dataclass(slots=True)
class Proposal:
    """Tokens that a controller proposed after the first `at` tokens of the sequence. The first `num_true` proposed
    tokens were accepted."""

    at: int
    tokens: tuple[int, ...]
    num_true: int = 0


@dataclass(slots=True)
class DraftState:
    """Recent acceptance rates of draft tokens, by source. `Speculation` and `ProposerSelector` write the acceptance
    rates."""

    proposed: AcceptanceRate = field(default_factory=AcceptanceRate)
    copied: AcceptanceRate = field(default_factory=AcceptanceRate)
    modelled: AcceptanceRate = field(default_factory=AcceptanceRate)
    #: Sizes of the parts of the current step's draft. A part is a guessed token and the tokens forced after it.
    sizes: tuple[int, ...] = ()
    proposal: Proposal | None = None  # the latest proposal, as long as it is right
    source: AcceptanceRate | None = None  # of the current draft; None: `copied`, because there was no draft yet
    # tokens sent ahead to a remote controller; None: the controller is not remote
    foretold: tuple[int, ...] | None = None
    chance: float = 0.0  # probability that each of these is right if those before it are
    watched: tuple[int, int] | None = None  # a position, and the token that was guessed there but not computed


@dataclass(slots=True)
class TraceBudget:
    """Budget for the trace of a request over all outputs: limits, and counts of kept and dropped records."""

    most_records: int = MAX_RECORDS
    num_said: int = MAX_SAID
    num_cut: int = 0
    num_records: int = 0


#: A traced draw: its bias, whether the token was a draft, the distributions of all rows of its step, and the number of
#: its row.
Drawn = tuple[tuple[tuple[int, float], ...], bool, Sequence[Draw | None], int]
#: The draw of a token that was not sampled.
NO_DRAW: Drawn = ((), False, (), 0)


@dataclass(slots=True)
class TraceState:
    """Data for the next trace record of a traced sequence. Written by `TraceRecorder`."""

    room: TraceBudget
    by: str | None  # name of the controller that steers the sequence
    num_seen: int = 0  # tokens that went through the model and were not rolled back
    drawn: Drawn = NO_DRAW  # the draw of the next token
    asked_at: float | None = None
    answered: float = 0.0  # seconds of the controller since the last token
    wait: WaitRecord | None = None  # the current wait
    waits_since: float = 0.0
    modules: tuple[tuple[str, str], ...] = ()  # names of controllers, and hashes of their modules

    def fork(self) -> TraceState:
        """Return the state of a copy of the sequence, which shares the trace budget."""
        return TraceState(self.room, self.by, self.num_seen)


@dataclass(slots=True)
class OutputState:
    """Text and tokens of an output, both sent and not yet sent, and their counts. `OutputProcessor` and its helpers
    write this state."""

    text: OutputText | None = None
    unsent: list[PendingToken] = field(default_factory=list)
    held: list[TokenEvent] = field(default_factory=list)  # events whose text may still be removed
    bans: dict[int, set[int]] = field(default_factory=dict)  # by position: tokens that lead to a banned phrase
    num_banned: int = 0  # number of last tokens to remove, because they spell forbidden text
    hit: GuardrailMatch | None = None  # match of an operator's rule that removes them
    num_retries: int = 0  # since text was last released
    changes: list[Change] = field(default_factory=list)  # changes not reported to the controller yet
    prompt_sent: bool = False
    num_scored: int = 0  # tokens whose log-probability is known or not requested
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)
    ending: tuple[FinishReason, int | str | None] | None = None  # finish once every token is scored
    meter: ConstraintMeter | None = None  # None: not requested
    aligned: AlignedSampling | None = None  # None: sampled under the mask alone
    unlikely: ForcedRun | None = None  # a run below the floor that was not handled yet
    usage: Usage = field(default_factory=Usage)
