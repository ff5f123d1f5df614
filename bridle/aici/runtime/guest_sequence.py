"""A sequence in a worker: a controller's instance and its tokens, for an engine of either dialect.

Engine and guest may speak different dialects; this module handles all four combinations. For an engine of dialect 2, a
dialect-1 guest's suspension becomes a branch that does nothing, and its forced tokens become a splice. If a dialect-1
guest forks, each fork starts with a branch that does nothing, and then gets its mid callback. For an engine of dialect
1, a dialect-2 guest is asked in the pre phase, and the mid phase returns its answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bridle.aici.replies import BranchReply, MidResult, PreResult, SpliceReply
from bridle.aici.runtime.guest_protocol import (
    Guest,
    Guest1,
    Guest2,
    GuestDecision,
    MidResult1,
    WaitRequest,
    guest_of,
    is_noop,
    noop,
    resting,
)
from bridle.aici.runtime.instance import Instance
from bridle.aici.runtime.storage import Variables
from bridle.errors import ControllerError, ControllerTrap

#: Maximum number of rounds of forced tokens in a pre phase. One more round is an error.
MAX_ROUNDS = 10


@dataclass(slots=True)
class _Stage:
    """State that a sequence's callback leaves for the next callback, for each combination of dialects."""

    choice: GuestDecision | None = None  # D2 guest, D1 engine: decided in pre, returned in mid
    branch: int = 0  # the branch of `choice` that belongs to this sequence
    wants_mid: bool = False  # D1 guest, D2 engine: pre is done, mid comes next
    group: list[int] | None = None  # D1 engine: the fork group that the guest has not seen yet
    wait: WaitRequest | None = None
    wait_end: float | None = None
    told: list[int] = field(default_factory=list)  # D2 guest, D1 engine: tokens not reported to the guest yet
    told_backtrack: int = 0
    cached_pre: PreResult | None = None  # D1b: result of the pre that ran at instantiation
    deferred: GuestDecision | None = None  # D2 guest, D1 engine: a fork that comes after forced tokens

    def copy(self, branch: int) -> _Stage:
        return _Stage(self.choice, branch, self.wants_mid, None, None, None, list(self.told), self.told_backtrack)


class GuestSequence:
    """One sequence with its guest. Methods raise `ControllerError` for every mistake of the guest."""

    def __init__(self, key: int, instance: Instance) -> None:
        self.key = key
        self.instance = instance
        self.guest: Guest = guest_of(instance)
        self.length = 0
        self.rewound = 0
        self.waits = 0
        self.probes: list[float] = []  # probes of the current op
        self._stage = _Stage()

    def start(self, prompt: list[int], budget_ms: float) -> list[int]:
        """Run the callbacks with which a guest starts. Returns the prompt, which the guest may have rewritten."""
        limits = self.instance.surroundings.limits
        begin = time.thread_time()
        self.instance.create(budget_ms)
        left = max(budget_ms - 1000 * (time.thread_time() - begin), limits.max_pre_step_time)
        prompt = self.guest.init_prompt(prompt, left)
        self.length = len(prompt)
        return prompt

    def fork(self, key: int, branch: int) -> GuestSequence:
        """Return a copy of this sequence for a branch of the last answer."""
        other = object.__new__(GuestSequence)
        other.key, other.instance = key, self.instance.fork()
        other.guest = guest_of(other.instance)
        other.length, other.rewound, other.waits, other.probes = self.length, self.rewound, 0, []
        other._stage = self._stage.copy(branch)
        return other

    def clone(self, spare: Instance | None, variables: Variables) -> GuestSequence:
        """Return a clone of this sequence for lookahead. The clone may reuse the memory of a `spare` instance."""
        other = object.__new__(GuestSequence)
        other.key, other.instance = self.key, self.instance.fork(variables, spare)
        other.guest = guest_of(other.instance)
        other.length, other.rewound, other.waits, other.probes = self.length, self.rewound, self.waits, []
        other._stage = replace(self._stage, told=list(self._stage.told))
        return other

    def become(self, key: int, branch: int) -> None:
        """Turn this object, in a forked child process, into the fork for a branch."""
        self.key = key
        self._stage = self._stage.copy(branch)
        self.instance.become(branch)

    # -- for a D2 engine -----------------------------------------------------------------------------------

    def step(
        self,
        backtrack: int,
        tokens: list[int],
        sampled: int | None,
        group: list[int],
        candidates: list[tuple[int, float]] | None,
        budget_ms: float,
        changes: Sequence[tuple[int, int, int, str]] = (),
    ) -> GuestDecision:
        """Run the guest's callbacks for one op of `mid_process`. Returns its decision."""
        self._account(backtrack, len(tokens))
        if self._still_waits() and not tokens and not backtrack:
            return self._count_wait(GuestDecision([self._resting()]))
        self._stage.wait = None
        if isinstance(self.guest, Guest2):
            choice = self.guest.mid(backtrack, tokens, sampled, group, candidates, budget_ms, changes, self.probes)
        else:
            choice = self._step_old(self.guest, backtrack, tokens, group, budget_ms)
        self._check_backtrack(choice)
        if choice.wait is not None:
            self._begin_wait(choice.wait)
            choice.branches = [self._resting()]
        return self._count_wait(choice)

    def keep_asking(
        self, choice: GuestDecision, turns: int, budget_ms: float, patience_ms: float = math.inf
    ) -> tuple[GuestDecision, int]:
        """Call the guest again while it does nothing, up to `turns` times in total. Each call has the time limit of a
        step. Returns the guest's decision and the number of calls. A waiting guest is not called, because its answer
        would not change."""
        num_turns = 1
        while num_turns < turns and choice.is_noop:
            if self._still_waits():
                return choice, turns
            self.instance.be_patient(patience_ms)
            choice = self.step(0, [], None, [self.instance.seq_id], None, budget_ms)
            num_turns += 1
        return choice, num_turns

    def _step_old(
        self, guest: Guest1, backtrack: int, tokens: list[int], group: list[int], budget_ms: float
    ) -> GuestDecision:
        """Run a dialect-1 guest's callbacks post, pre and mid, as far as one step allows."""
        if not self._stage.wants_mid:
            if (tokens or backtrack) and guest.post(tokens, backtrack, budget_ms):
                return GuestDecision([])
            pre = guest.pre(budget_ms)
            if pre.suspend:
                return GuestDecision([resting([])])
            if pre.num_forks == 0:
                return GuestDecision([])
            if pre.ff_tokens:
                return GuestDecision([BranchReply(splices=[SpliceReply([], 0, pre.ff_tokens)])])
            if pre.num_forks > 1:
                self._stage.wants_mid = True
                return GuestDecision([noop() for _ in range(min(pre.num_forks, 1 << 16))])
        self._stage.wants_mid = False
        return self._choice_of(guest.mid(group, budget_ms))

    def _choice_of(self, mid: MidResult1) -> GuestDecision:
        if mid.is_stop:
            return GuestDecision([])
        if mid.splice is not None:
            backtrack, tokens = mid.splice
            return GuestDecision([BranchReply(splices=[SpliceReply([], backtrack, tokens)])])
        mask = mid.mask
        if mask is None or not any(mask):  # in D1 an empty set does not constrain
            mask = self._all_tokens()
        return GuestDecision([BranchReply(sample_mask=0)], [mask])

    # -- for a D1 engine -----------------------------------------------------------------------------------

    def first_pre(self, budget_ms: float) -> PreResult:
        """Run the pre callback that dialect 1b has at instantiation. Tokens forced by this callback belong to the
        prompt."""
        result = self.pre(budget_ms)
        if result.suspend or result.num_forks == 0:
            raise self.instance.broke(ControllerTrap("the first pre callback must neither suspend nor stop"))
        self.length += len(result.ff_tokens)
        if result.ff_tokens:
            self._stage.cached_pre = PreResult(False, result.num_forks, [])
        return PreResult(False, 1, result.ff_tokens)

    def post(self, tokens: list[int], backtrack: int, budget_ms: float) -> bool:
        """Report the last step to the guest. Returns whether the guest stops. `backtrack` includes a sampled token that
        was discarded."""
        older = max(backtrack - 1, 0)
        self._account(older, len(tokens))
        self._stage.cached_pre = None
        if isinstance(self.guest, Guest1):
            if not tokens and not older:  # a noop of this module
                return False
            return self.guest.post(tokens, older, budget_ms)
        stage = self._stage
        shorter = min(older, len(stage.told))
        del stage.told[len(stage.told) - shorter :]
        stage.told_backtrack += older - shorter
        stage.told += tokens
        stage.choice = None
        return False

    def pre(self, budget_ms: float) -> PreResult:
        """Ask the guest whether and how the sequence continues in this step."""
        if self._stage.cached_pre is not None:
            cached, self._stage.cached_pre = self._stage.cached_pre, None
            return cached
        if isinstance(self.guest, Guest1):
            result = self._pre_old(self.guest, budget_ms)
        else:
            result = self._pre_new(self.guest, budget_ms)
        self.length += len(result.ff_tokens)
        self._count(result.suspend)
        return result

    def mid(self, group: list[int], budget_ms: float) -> tuple[MidResult | None, bytes]:
        """Return the decision for a scheduled sequence: a splice or None, and the mask of the next token."""
        self._stage.cached_pre = None
        if isinstance(self.guest, Guest1):
            return self._handed_out(self.guest.mid(group, budget_ms))
        stage = self._stage
        if stage.choice is None:  # the engine skipped the pre phase
            self._pre_new(self.guest, budget_ms)
        if stage.choice is None:
            return MidResult([], 1), self._all_tokens()
        choice, stage.choice = stage.choice, None
        if len(choice.branches) > 1:
            stage.group = group
        return self._handed_out_new(choice, choice.branches[min(stage.branch, len(choice.branches) - 1)])

    def _pre_old(self, guest: Guest1, budget_ms: float) -> PreResult:
        forced: list[int] = []
        for _ in range(MAX_ROUNDS + 1):
            result = guest.pre(budget_ms)
            if not result.ff_tokens:
                result.ff_tokens = forced
                if result.suspend and forced:  # forced tokens come first; the guest is asked again in the next step
                    return PreResult(False, 1, forced)
                return result
            forced += result.ff_tokens
            if guest.post(result.ff_tokens, 0, budget_ms):
                return PreResult(False, 0, result.ff_tokens)
        raise self.instance.broke(ControllerTrap(f"more than {MAX_ROUNDS} rounds of forced tokens in a step"))

    def _pre_new(self, guest: Guest2, budget_ms: float) -> PreResult:
        """Ask a dialect-2 guest in the pre phase until it needs the model."""
        stage = self._stage
        if self._still_waits():
            return PreResult(suspend=True)
        if stage.deferred is not None:
            stage.choice, stage.deferred = stage.deferred, None
            return PreResult(False, len(stage.choice.branches), [])
        forced: list[int] = []
        for _ in range(MAX_ROUNDS + 1):
            told, backtrack = stage.told, stage.told_backtrack
            group = stage.group or [self.instance.seq_id]
            stage.told, stage.told_backtrack, stage.group, stage.branch = [], 0, None, 0
            sampled = told[0] if len(told) == 1 and not backtrack and not forced else None
            choice = guest.mid(backtrack, told, sampled, group, None, budget_ms)
            self._check_backtrack(choice, len(forced))
            if choice.wait is not None:
                self._begin_wait(choice.wait)
            if not choice.branches:
                return PreResult(False, 0, forced)
            if choice.is_noop:
                return PreResult(False, 1, forced) if forced else PreResult(suspend=True)
            splice = choice.branches[0].splices[0] if choice.branches[0].sample_mask is None else None
            # D1 has no answer with forks and forced tokens, so the tokens come first
            if len(choice.branches) > 1 and forced:
                stage.deferred, stage.choice = choice, GuestDecision([noop()])
                return PreResult(False, 1, forced)
            if len(choice.branches) > 1 or splice is None or splice.backtrack:
                stage.choice = choice
                return PreResult(False, len(choice.branches), forced)
            forced += splice.ff_tokens
            stage.told = list(splice.ff_tokens)
        raise self.instance.broke(ControllerTrap(f"more than {MAX_ROUNDS} rounds of forced tokens in a step"))

    def _handed_out(self, mid: MidResult1) -> tuple[MidResult | None, bytes]:
        """Return a dialect-1 guest's result, with the bias row that dialect 1 prescribes for it."""
        size = len(self._all_tokens())
        if mid.is_stop:
            return None, self._only(self.instance.surroundings.vocabulary.eos)
        if mid.splice is None:
            return None, mid.mask if mid.mask is not None else bytes(size)
        backtrack, tokens = mid.splice
        if backtrack > self.length:
            raise self._too_far(backtrack)
        if backtrack:
            return MidResult(tokens, backtrack + 1), self._all_tokens()
        return MidResult(tokens, 0), self._only(tokens[0])

    def _handed_out_new(self, choice: GuestDecision, branch: BranchReply) -> tuple[MidResult | None, bytes]:
        """Return a branch of a dialect-2 guest as a dialect-1 result."""
        everything = self._all_tokens()
        if branch.sample_mask is not None:
            mask = choice.masks[branch.sample_mask]
            if not branch.splices:
                return None, mask
            splice = branch.splices[0]
            if splice.when_sampled or not splice.backtrack:
                raise self.instance.broke(ControllerTrap("a splice that depends on the sample needs a D2 engine"))
            return MidResult(splice.ff_tokens, splice.backtrack), mask
        splice = branch.splices[0]
        if splice.backtrack or not splice.ff_tokens:
            return MidResult(splice.ff_tokens, splice.backtrack + 1), everything
        return MidResult(splice.ff_tokens, 0), self._only(splice.ff_tokens[0])

    # -- counts and limits ---------------------------------------------------------------------------------

    def _account(self, backtrack: int, num_tokens: int) -> None:
        limit = self.instance.surroundings.limits.max_rewound_tokens
        self.length = max(self.length - backtrack, 0) + num_tokens
        self.rewound += backtrack
        if self.rewound > limit:
            raise self.instance.broke(ControllerTrap(f"{self.rewound} tokens rolled back exceed the limit of {limit}"))

    def _check_backtrack(self, choice: GuestDecision, ahead: int = 0) -> None:
        """Raise an error if the guest rolls back more tokens than the sequence has. `ahead` is the number of forced
        tokens that are not counted yet."""
        for branch in choice.branches:
            sampled = 0 if branch.sample_mask is None else 1
            for splice in branch.splices:
                if splice.backtrack - sampled > self.length + ahead:
                    raise self._too_far(splice.backtrack - sampled)

    def _too_far(self, backtrack: int) -> ControllerError:
        return self.instance.broke(
            ControllerTrap(f"backtrack of {backtrack} tokens, but the sequence has only {self.length}")
        )

    def _count_wait(self, choice: GuestDecision) -> GuestDecision:
        self._count(choice.is_noop)
        return choice

    def _count(self, waits: bool) -> None:
        limit = self.instance.surroundings.limits.max_waits
        self.waits = self.waits + 1 if waits else 0
        if self.waits > limit:
            raise self.instance.broke(ControllerTrap(f"waited for more than {limit} steps in a row"))

    def _begin_wait(self, wait: WaitRequest) -> None:
        self._stage.wait = wait
        self._stage.wait_end = None if wait.ms is None else time.monotonic() + wait.ms / 1000

    def _resting(self) -> BranchReply:
        """Return the waiting branch, with the events that end the wait. If an event that ends the wait has already
        happened, the guest is called in the next step."""
        wait = self._stage.wait
        if wait is None or wait.ms is not None or wait.variable is None:
            return resting()
        return resting([(wait.variable, wait.newer_than)] if self._still_waits() else [])

    def _still_waits(self) -> bool:
        wait, end = self._stage.wait, self._stage.wait_end
        if wait is None:
            return False
        if end is not None and time.monotonic() >= end:
            return False
        return wait.variable is None or self.instance.variables.version(wait.variable) <= wait.newer_than

    def _all_tokens(self) -> bytes:
        return b"\xff" * (4 * ((self.instance.surroundings.vocabulary.size + 31) // 32))

    def _only(self, token: int) -> bytes:
        row = bytearray(len(self._all_tokens()))
        row[token >> 3] = 1 << (token & 7)
        return bytes(row)


__all__ = ["MAX_ROUNDS", "GuestSequence", "is_noop"]
