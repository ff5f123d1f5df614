"""Draft tokens from a smaller model with the same vocabulary. The draft model has its own executor and KV.

The proposer keeps a shadow of each sequence: a sequence with the same tokens, but with separate blocks and a separate
count of computed tokens. Between two calls, a sequence may change: tokens are sampled, forced or rolled back, or it is
forked or preempted. The shadow then takes over the sequence's tokens, keeps the KV of the common beginning, and
computes the other tokens. Blocks of prompts are found by their hashes, as in the engine. Each forward pass then gives
one token for every sequence; `DraftStep` says how that token is sampled. If the draft model fails, there are no more
draft tokens, but requests continue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bridle.engine.control.decision_validator import DecisionValidator
from bridle.engine.interfaces import Executor
from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.request import Request
from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.engine.scheduling.step_plan import BlockCopy, SampleBatch, StepPlan
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import QueueState
from bridle.engine.spec_decode.draft_step import DraftStep, first_way
from bridle.engine.spec_decode.proposers import Drafts, Proposer, Wish
from bridle.engine.spec_decode.step_cost import Average, StepCost

_log = logging.getLogger(__name__)

#: Number of failures in a row after which the draft model is not used any more.
_MAX_FAILURES = 3
#: A pass of at least this many tokens is counted as reading a prompt; a smaller one is counted as a step.
_LONG = 32


@dataclass(slots=True, eq=False)
class _Shadow:
    """The draft model's copy (shadow) of a sequence. `own` has the tokens that the sequence had in the last step.
    Tokens after the first `num_known` are draft tokens."""

    own: Sequence
    num_known: int


class DraftModelProposer(Proposer):
    """A `Proposer` over the executor of a draft model. `vocab_size` is that of the main model, which never samples
    `unnamed` ids."""

    def __init__(
        self,
        executor: Executor,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        unnamed: PaddedVocab = NONE_UNNAMED,
    ) -> None:
        info = self._info = executor.info
        self._executor = executor
        self._clock = clock
        self._rules = DecisionValidator(vocab_size, unnamed)
        self._unnamed = unnamed.resized(info.vocab_size, min(vocab_size, info.vocab_size))
        caching, self._by_sequence = info.kv == "paged", info.kv == "sequences"
        self.blocks = BlockManager(info.num_blocks, info.block_size, enable_prefix_caching=caching, model=info.model)
        self.shadows: dict[int, _Shadow] = {}
        self._freed: list[int] = []
        self._step = 0
        self._num_failures = 0  # failures in a row
        self._cost = StepCost()
        self._reading = Average()

    # -- interface of a proposer ---------------------------------------------------------------------------

    def propose(self, wishes: Iterable[Wish]) -> Drafts:
        """Run the draft model once for each token of the longest draft. If the draft model has too many tokens of a
        sequence to compute, it computes only some of them, and drafts none. While no draft is requested, the measured
        cost slowly decreases."""
        if self._num_failures >= _MAX_FAILURES:
            return {}
        try:
            going = turns = self._begin(wishes)
            if not turns:
                self._cost.fade()
            while going:
                going = self._advance(going)
        except Exception as error:  # after any error, the sequences continue without drafts
            self._fail(error)
            return {}
        self._num_failures = 0
        return {turn.seq.id: drafted for turn in turns if (drafted := tuple(turn.own.tokens[len(turn.seq.tokens) :]))}

    def seconds(self, num_sequences: int) -> float:
        """Return the measured seconds per token; 0 before the first measurement."""
        return self._cost.of_step(num_sequences) if self._cost.is_known else 0.0

    def seconds_behind(self, seq: Sequence) -> float:
        """Return the estimated seconds that the draft model needs to compute all known tokens of `seq`; 0 before the
        first long prompt."""
        shadow = self.shadows.get(seq.id)
        num_known = shadow.own.kv.num_computed if shadow else 0
        return max(len(seq.tokens) - num_known - 1, 0) * self._reading.each

    def cut(self, seq: Sequence) -> None:
        """Record how many tokens of the draft model's copy still equal the tokens of the sequence."""
        shadow = self.shadows.get(seq.id)
        if shadow is not None:
            shadow.num_known = min(shadow.num_known, len(seq.tokens))

    def forget(self, seq: Sequence) -> None:
        """Release the blocks of the draft model's copy; full blocks stay in the cache."""
        shadow = self.shadows.pop(seq.id, None)
        if shadow is not None:
            self.blocks.free(shadow.own)
            self._freed.append(seq.id)

    def close(self) -> None:
        self._executor.close()

    # -- updating shadows ----------------------------------------------------------------------------------

    def _begin(self, wishes: Iterable[Wish]) -> list[DraftStep]:
        """Return the drafts that this call of `propose` begins. If a request has several new outputs, only the draft of
        the first output begins. The other outputs later find the blocks of the first output in the cache."""
        turns: list[DraftStep] = []
        begun: set[str] = set()
        for seq, limit in wishes:
            is_new = seq.id not in self.shadows
            if is_new and seq.request.id in begun:
                continue
            turn = self._turn(seq, limit)
            if turn is not None:
                turns.append(turn)
                if is_new and turn.own.kv.num_computed + self._info.block_size < len(seq.tokens):
                    begun.add(seq.request.id)
        return turns

    def _turn(self, seq: Sequence, limit: int) -> DraftStep | None:
        """Update the draft model's copy to the tokens of `seq`. Returns None if the draft model cannot continue, or if
        it is not known how the sequence samples next."""
        limit = min(limit, self._info.max_model_len - len(seq.tokens))
        shadow = self.shadows.get(seq.id)
        num_known = shadow.num_known if shadow else 0
        if limit <= 0 or max(seq.tokens[num_known:], default=0) >= self._info.vocab_size:
            return None
        way = first_way(seq, self._rules)
        if way is None:
            return None
        if shadow is None:
            shadow = self.shadows[seq.id] = _Shadow(self._new_shadow(seq), len(seq.tokens))
            self.blocks.admit(shadow.own)  # uses cached blocks; does nothing if there is no room for the other blocks
        else:
            self._follow(shadow, seq)
        return DraftStep(seq, shadow.own, limit, way, self._info.vocab_size)

    def _new_shadow(self, seq: Sequence) -> Sequence:
        sampling = seq.sampling
        if sampling.scores_output or sampling.prompt_logprobs is not None:
            sampling = sampling.with_(
                logprobs=None, prompt_logprobs=None, constraint_report=False, constraint_floor=None
            )
        return Sequence(
            id=seq.id,
            request=Request(seq.request.id, (), sampling, tenant=seq.request.tenant),
            index=seq.index,
            tokens=seq.tokens.copy(),
            num_prompt=seq.num_prompt,
            sampling=sampling,
            max_len=min(seq.max_len, self._info.max_model_len),
            key=seq.key,
            queue=QueueState(seq.queue.level),
        )

    def _follow(self, shadow: _Shadow, seq: Sequence) -> None:
        """Copy the tokens of `seq` that the draft model's copy lacks. Right draft tokens keep their KV."""
        own, num_same = shadow.own, shadow.num_known
        for drafted, token in zip(own.tokens[num_same:], seq.tokens[num_same:], strict=False):
            if drafted != token:
                break
            num_same += 1
        own.truncate(num_same)
        own.tokens += seq.tokens[num_same:]
        own.num_prompt, shadow.num_known = seq.num_prompt, len(seq.tokens)
        own.kv.num_computed = min(own.kv.num_computed, num_same)
        own.clamp_computed()
        if not self._by_sequence:
            self.blocks.truncate(own)

    # -- computing -----------------------------------------------------------------------------------------

    def _advance(self, turns: list[DraftStep]) -> list[DraftStep]:
        """Run one forward pass of the draft model, which gives a token for each copy that is up to date. Returns the
        drafts that need further tokens."""
        began = self._clock()
        self._step += 1
        plan = StepPlan(self._step)
        picked = self._pick(turns, plan.copies)
        plan.freed, self._freed = self._freed, []  # including sequences that were dropped to make room for this pass
        drawing = [turn for turn in picked if turn.own.kv.num_computed + turn.num_tokens == len(turn.own.tokens)]
        plan.rows = [turn.own.plan_row(turn.num_tokens) for turn in picked]
        if not (plan.rows or plan.freed):
            return []
        self._executor.forward(plan)
        for turn in picked:
            turn.own.kv.num_computed += turn.num_tokens
            self.blocks.publish(turn.own)
        if plan.num_tokens >= _LONG:
            self._reading.note(plan.num_tokens, self._clock() - began)
        if not drawing:
            return []
        rows = [turn.row(index) for index, turn in enumerate(drawing)]
        batch = SampleBatch(self._step, rows, unnamed=self._unnamed)
        tokens = self._executor.sample(batch).tokens
        going = [turn for turn, token in zip(drawing, tokens, strict=True) if self._append(turn, token)]
        if plan.num_tokens == len(drawing):
            self._cost.note(len(drawing), self._clock() - began)
        return going

    def _pick(self, turns: list[DraftStep], copies: list[BlockCopy]) -> list[DraftStep]:
        """Select the rows of one forward pass of the draft model. Sequences with few uncomputed tokens come first."""
        budget = self._info.max_num_batched_tokens
        picked: list[DraftStep] = []
        for turn in sorted(turns, key=lambda turn: len(turn.own.tokens) - turn.own.kv.num_computed):
            own = turn.own
            turn.num_tokens = min(len(own.tokens) - own.kv.num_computed, budget)
            end = own.kv.num_computed + turn.num_tokens
            if not turn.num_tokens or len(picked) == self._info.max_num_seqs or not self._make_room(own, end, turns):
                continue
            if self._by_sequence:  # such an executor frees truncated KV with the next row
                self.blocks.truncate(own)
            copies += self.blocks.allocate(own, end)
            picked.append(turn)
            budget -= turn.num_tokens
        picked.sort(key=lambda turn: turn.num_tokens > 1)
        return picked

    def _make_room(self, own: Sequence, end: int, turns: list[DraftStep]) -> bool:
        """Return whether there are enough free blocks to compute `own` up to `end`. If necessary, the draft model's
        copies of sequences that get no draft are dropped."""
        busy = {turn.own.id for turn in turns}
        idle = (shadow.own for seq_id, shadow in list(self.shadows.items()) if seq_id not in busy)
        while self.blocks.num_needed(own, end) > self.blocks.num_free:
            victim = next(idle, None)
            if victim is None:
                return False
            self.forget(victim)
        return True

    def _append(self, turn: DraftStep, token: int) -> bool:
        """Append a drafted token. Returns whether another draft token is needed after this one."""
        return 0 <= token < self._rules.vocab_size and turn.append(token, self._rules)

    def _fail(self, error: Exception) -> None:
        """Drop all copies of sequences, because the state of the draft model's executor is unknown after an error."""
        self._num_failures += 1
        ends = "; it is not asked any more" if self._num_failures == _MAX_FAILURES else ""
        _log.warning("the draft model failed, and this step has no draft tokens%s: %r", ends, error)
        for shadow in list(self.shadows.values()):
            self.forget(shadow.own)
        self.blocks.forget_content()
        self._freed.clear()
        self._executor.reset()
