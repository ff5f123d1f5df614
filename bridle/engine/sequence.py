"""One token list with KV: the unit of scheduling.

A sequence is its tokens plus one counter, `num_computed`: KV exists for `tokens[:num_computed]`, everything after
has to go through the model. Prompt, chunked prompt, decode, forced tokens, resuming after a preemption and running
again after a rewind are all the same state. The sequence knows nothing of batches, budgets or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from bridle.engine.decision import Decision
from bridle.engine.interfaces import Ask, ControllerPool
from bridle.engine.output_text import OutputText
from bridle.engine.plan import PlanRow
from bridle.engine.request import Request, StoppingCriteria
from bridle.outputs import FinishReason, Logprob, Usage
from bridle.sampling import SamplingParams

_MASK64 = (1 << 64) - 1


class SequenceStatus(Enum):
    """Where a sequence stands with the scheduler."""

    OPENING = auto()  # its controller is being made
    WAITING = auto()  # holds no blocks
    RUNNING = auto()  # holds blocks
    FINISHED = auto()


def mix64(value: int) -> int:
    """A bijective scramble of 64 bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def root_key(seed: int) -> int:
    """Random key of a request's first sequence."""
    return mix64(seed & _MASK64)


def fork_key(key: int, ordinal: int, branch: int) -> int:
    """Random key of branch `branch` (from 1) of a sequence's fork number `ordinal` (from 0).

    Branch 0 goes on with the parent's key. A draw depends on the seed, this path and the number of draws so far,
    and on nothing else.
    """
    return mix64(mix64(key) + ((ordinal << 16) | branch))  # not `key ^ mix64(...)`: seeds are small numbers too


@dataclass(slots=True)
class UnsentToken:
    """A token whose event waits for its log-probability."""

    token: int
    text: str
    forced: bool


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one output of a request. Mutated by the engine and the scheduler only."""

    id: int
    request: Request
    index: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    max_len: int  # of tokens, prompt included
    key: int
    max_turns: int = 1 << 62  # draws and splices, for controlled sequences
    stop_ids: frozenset[int] = frozenset()
    stopping: tuple[StoppingCriteria, ...] = ()
    text: OutputText | None = None
    pool: ControllerPool | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    level: int = field(init=False)  # of urgency, smaller ones first: its request's, until it overtakes a higher one

    num_computed: int = 0
    is_prefilling: bool = False  # since it was given room, not all of its tokens have been computed
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of `tokens`, as far as known
    num_hashed: int = 0  # blocks of the table that were offered to the prefix cache

    # what the executor's mirror already has
    num_mirrored_tokens: int = 0
    num_mirrored_blocks: int = 0

    # times of the engine's clock, in seconds
    queued_at: float | None = None
    queue_seconds: float | None = None  # until it was first given room
    opened_at: float | None = None  # its controller was asked for
    opening_seconds: float = 0.0  # until that was made
    held_at: float = 0.0  # the last step in which its controller kept it from going on
    held_seconds: float = 0.0  # that its controller kept it from going on, so far

    # randomness and bounds
    num_draws: int = 0
    num_forks: int = 0
    num_turns: int = 0
    num_idle_steps: int = 0

    # log-probabilities
    num_scored: int = 0  # tokens whose score is known or not wanted
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)
    unsent: list[UnsentToken] = field(default_factory=list)
    prompt_sent: bool = False

    # control
    asked: bool = False  # an answer is due
    answer: Decision | None = None  # arrived, not applied yet
    is_late: bool = False  # missed a step: not computed until it answers
    is_suspended: bool = False  # its controller said wait
    news: Ask | None = None  # what to tell its controller next
    is_dismissed: bool = False  # its controller was told that this is the end
    was_forked: bool = False  # the request's own n outputs exist

    sits_out: bool = False  # its adapter has no place in the step under way

    # ending
    ending: tuple[FinishReason, int | str | None] | None = None  # finish once every token is scored
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        self.level = self.request.priority

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_controlled(self) -> bool:
        return self.pool is not None

    @property
    def is_held(self) -> bool:
        """Whether its controller holds it up."""
        return self.is_late or self.is_suspended

    @property
    def is_ready(self) -> bool:
        """Whether there is something to compute that neither its controller nor its adapter holds up."""
        return not (self.is_late or self.is_suspended or self.sits_out)

    @property
    def target(self) -> int:
        """How many tokens must go through the model: all, so that the next one can be drawn; all but the last
        if only scores are still wanted."""
        return len(self.tokens) - (self.ending is not None)

    @property
    def num_to_score(self) -> int:
        """Tokens whose log-probability is wanted, counted from the start of the sequence."""
        if self.sampling.logprobs is not None:
            return len(self.tokens)
        return self.num_prompt if self.sampling.prompt_logprobs is not None else 0

    @property
    def wants_scores(self) -> bool:
        """Whether a log-probability that was asked for is still unknown."""
        return self.num_scored < self.num_to_score

    @property
    def max_reusable(self) -> int:
        """How many leading tokens may come from the prefix cache: cached positions give no logits, so at least
        the last token, and everything that predicts a token to be scored, is computed."""
        limit = len(self.tokens) - 1
        if self.wants_scores:
            limit = min(limit, self.num_scored - 1)
        return max(limit, 0)

    def append(self, token: int) -> None:
        """One more token."""
        self.tokens.append(token)

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens. The caller trims the blocks."""
        del self.tokens[num_tokens:]
        self.num_prompt = min(self.num_prompt, num_tokens)
        self.num_mirrored_tokens = min(self.num_mirrored_tokens, num_tokens)
        self.num_scored = min(self.num_scored, num_tokens)
        self.clamp_computed()

    def clamp_computed(self) -> None:
        """At least one token goes through the model before the next draw (engine invariant 1)."""
        self.num_computed = min(self.num_computed, self.max_reusable)

    def forget_kv(self) -> None:
        """Everything is computed again: after a preemption."""
        self.num_computed = 0
        self.num_mirrored_blocks = 0
        self.num_hashed = 0

    def forget_mirror(self) -> None:
        """The executor lost this sequence: after a reset."""
        self.forget_kv()
        self.num_mirrored_tokens = 0

    def plan_row(self, num_tokens: int) -> PlanRow:
        """The row that computes the next `num_tokens`: what the executor's mirror does not know yet, and which logits
        are wanted. The mirror is up to date from then on."""
        row = PlanRow(
            seq_id=self.id,
            start=self.num_computed,
            num_scheduled=num_tokens,
            num_logits=self._num_logits(num_tokens),
            num_kept=self.num_mirrored_tokens,
            new_tokens=tuple(self.tokens[self.num_mirrored_tokens :]),
            num_kept_blocks=self.num_mirrored_blocks,
            new_blocks=tuple(self.block_table[self.num_mirrored_blocks :]),
            num_prompt=self.num_prompt,
            adapter=self.request.adapter,
        )
        self.num_mirrored_tokens = len(self.tokens)
        self.num_mirrored_blocks = len(self.block_table)
        return row

    def _num_logits(self, num_tokens: int) -> int:
        """How many of the last scheduled positions must give logits: those that predict a token to be scored, and
        the last one if the next token is drawn from it."""
        start, end = self.num_computed, self.num_computed + num_tokens
        draws = end == len(self.tokens)
        if not self.wants_scores:
            return int(draws)
        first = max(self.num_scored, start + 1) - 1  # predicts the first token to score
        if first < min(end, self.num_to_score - 1):
            return end - first
        return int(draws)

    def fork(self, new_id: int, index: int, branch: int) -> Sequence:
        """A copy for branch `branch` of the fork under way; the caller shares the blocks."""
        child = Sequence(
            id=new_id,
            request=self.request,
            index=index,
            tokens=self.tokens.copy(),
            num_prompt=self.num_prompt,
            sampling=self.sampling,
            max_len=self.max_len,
            key=fork_key(self.key, self.num_forks, branch),
            max_turns=self.max_turns,
            stop_ids=self.stop_ids,
            stopping=self.stopping,
            text=self.text.copy() if self.text else None,
            pool=self.pool,
            status=SequenceStatus.RUNNING,
            num_computed=self.num_computed,
            block_hashes=self.block_hashes.copy(),
            num_hashed=self.num_hashed,
            num_draws=self.num_draws,
            num_turns=self.num_turns,
            num_scored=len(self.tokens),
            prompt_sent=True,
            was_forked=True,
        )
        child.level = self.level
        child.usage = Usage(
            prompt_tokens=self.usage.prompt_tokens,
            cached_tokens=self.usage.cached_tokens,
            completion_tokens=self.usage.completion_tokens,
            shared_tokens=self.num_computed,
        )
        return child
