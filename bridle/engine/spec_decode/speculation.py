"""Decides how many tokens to draft for which sequences. With drafts, one forward pass may give several tokens of a
sequence.

A draft costs a row of the step and the time of its proposer. A draft token gives an output token if it equals the
sampled token. Drafts never change the output: each drafted position is sampled with the random number and key that it
would have later. A wrong draft token is dropped with all draft tokens after it (`SamplePlanner`). So this module
affects only the speed.

A draft token is computed if its probability exceeds a threshold: its row's share of the step's time, times the step's
tokens without it. The probability comes from recent acceptance rates. So a full batch, which has expensive rows and
many tokens, gets no drafts. A copy from the text costs no time, so the copy is made before `Speculation` decides
whether it is worth its row. For a draft model, `Speculation` decides before the model runs. A request may set a maximum
number of draft tokens. A request gets this number until the cost of rows is known, and after that as many as are worth
their cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from bridle.engine.control.decision import Decision
from bridle.engine.scheduling.step_plan import StepPlan
from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.cost_model import MOST_DRAFTS, BaseStep, DraftProposal, DraftRequest, worth_while, worthy
from bridle.engine.spec_decode.proposer_selection import DraftBackoff, ProposerSelector, singles
from bridle.engine.spec_decode.proposers import Drafts, Proposer, proposed
from bridle.engine.spec_decode.step_cost import StepCost
from bridle.errors import InvalidRequest
from bridle.sampling import AUTO_DRAFTS, MAX_DRAFTS

#: Maximum number of draft tokens that are sent ahead to remote controllers in one step.
_MOST_TOLD = 64
#: Measured seconds to clone the guest of a remote controller. Drafts are sent ahead to several controllers only if the
#: step has this much time for each of the controllers.
_CLONE_SECONDS = 1.25e-3
#: A row with more tokens than this counts as part of a prompt.
_MOST_FORCED = 32
#: Number of steps after which the cost of rows counts as known.
ENOUGH_STEPS = 16
#: Maximum number of steps without a search for drafts, after steps in which no draft was worth its cost.
_LONGEST_REST = 8
#: Maximum number of steps without a search for drafts, after steps in which the text gave no copy.
_LONGEST_SILENCE = 3


class Speculation:
    """Makes the drafts for the sequences of a step. `default` applies to requests without a setting: a number of draft
    tokens, `AUTO_DRAFTS`, or None (automatic with a draft `model`, else none)."""

    def __init__(
        self,
        default: int | None = None,
        model: Proposer | None = None,
        vocab_size: int = 1 << 31,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        if default is not None and not AUTO_DRAFTS <= default <= MAX_DRAFTS:
            raise InvalidRequest(
                f"speculate is {default} draft tokens; must be between {AUTO_DRAFTS} (auto) and {MAX_DRAFTS}",
                "speculate",
            )
        self._default = default if default is not None else AUTO_DRAFTS if model is not None else 0
        self.is_used = self._default != 0  # whether any request so far has asked for drafts
        self.rest = DraftBackoff()
        self.guessing = ProposerSelector(model, vocab_size, timer, self.rest)
        self.cost = StepCost()

    def on_sequence_added(self, seq: Sequence) -> None:
        """Record that a sequence begins. Costs are measured once a sequence asks for drafts or has a proposal."""
        asked, predicted = seq.sampling.speculate, seq.sampling.prediction_ids
        self.is_used = self.is_used or bool(predicted if asked is None else asked)

    def _wanted(self, seq: Sequence) -> int:
        """Return how many draft tokens the request of `seq` asks for."""
        wanted = seq.sampling.speculate
        if wanted is None:
            has_proposal = seq.drafts.proposal is not None and bool(proposed(seq, 1))
            return AUTO_DRAFTS if seq.sampling.prediction_ids or has_proposal else self._default
        return wanted

    def on_decision(self, seq: Sequence, decision: Decision) -> None:
        """Record the tokens that a controller proposes with its answer."""
        self.guessing.on_decision(seq, decision)
        if seq.drafts.proposal is not None:
            self.is_used = self.is_used or seq.sampling.speculate != 0
            self.rest.end()

    def draft_for_remote_controllers(self, sequences: Iterable[Sequence]) -> Drafts:
        """Return drafts for the next step of sequences with remote controllers. Remote controllers get the draft tokens
        together with the current `Ask`; `draft` returns no further tokens for them."""
        if not self.is_used:
            return {}
        chosen = list(sequences)
        for seq in chosen:
            seq.drafts.foretold = ()
        if self.rest.holds(chosen):
            return {}
        wishes = self._wishes(chosen)
        if not wishes:
            return {}
        num_sequences = max(self.guessing.num_sequences, len(chosen))
        seconds = self.cost.of_step(num_sequences)
        step = BaseStep(seconds, self.cost.of_row(), self.cost.of_other(), num_sequences, _MOST_TOLD)
        self.rest.is_due = all(wish.is_free for wish in wishes)
        wishes = worthy(wishes, step)
        has_time = not self.rest.is_due or len(chosen) == 1 or seconds > len(chosen) * _CLONE_SECONDS
        guesses = self.guessing.guess(wishes, step) if has_time else self.guessing.take_proposals(wishes)
        self.rest.was_due = self.rest.is_due and not guesses
        drafts = worth_while(guesses, step)
        for guess in guesses:
            state = guess.wish.seq.drafts
            state.foretold, state.chance = guess.tokens(drafts.get(guess.wish.seq.id, 0)), guess.chance
        return {guess.wish.seq.id: told for guess in guesses if (told := guess.wish.seq.drafts.foretold)}

    def draft(self, sequences: Iterable[Sequence], num_tokens: int, room: int) -> Drafts:
        """Return drafts for a step, at most `room` tokens in total. The step computes `num_tokens` tokens and samples
        one token of each sequence."""
        chosen = list(sequences)
        self.guessing.num_sequences = len(chosen)
        if room <= 0 or self.rest.goes_on(chosen):
            return {}
        wishes = self._wishes(chosen)
        if not wishes:
            return {}
        are_free = self.rest.is_due = all(wish.is_free for wish in wishes)
        seconds = self.cost.of_step(len(chosen), num_tokens - len(chosen))
        step = BaseStep(seconds, self.cost.of_row(), self.cost.of_other(), len(chosen), room)
        wishes = worthy(wishes, step)
        told = [wish for wish in wishes if wish.seq.drafts.foretold is not None]
        guesses = [
            DraftProposal(wish, singles(tokens), wish.seq.drafts.chance) for wish in told if (tokens := _told(wish))
        ]
        guesses += self.guessing.guess(
            [wish for wish in wishes if wish.seq.drafts.foretold is None] if told else wishes, step
        )
        if guesses:
            self.rest.end()
        elif self.rest.is_due and (self.rest.was_due or not told):
            self.rest.begin(chosen, _LONGEST_REST)
        elif are_free and not told:
            self.rest.begin(chosen, _LONGEST_SILENCE)
        drafts, counts = {}, worth_while(guesses, step)
        for guess in guesses:
            seq, taken = guess.wish.seq, counts.get(guess.wish.seq.id, 0)
            if taken:
                drafts[seq.id] = guess.tokens(taken)
                seq.drafts.sizes = tuple(map(len, guess.parts[:taken]))
            elif guess.parts and seq.drafts.source is seq.drafts.copied:
                self.guessing.track_unverified(seq, guess.parts[0])
        return drafts

    def note_step(self, plan: StepPlan, sequences: Iterable[Sequence], waited: float, seconds: float) -> None:
        """Update the cost of rows after a step of `sequences` that took `seconds`. `waited` of these seconds were spent
        on waiting for controllers. Steps with long prompts or without tokens are ignored."""
        self.guessing.note_waited(sequences, waited)
        seconds -= waited + self.guessing.take_seconds_ahead()
        others = [row.num_scheduled - row.num_logits for row in plan.rows]
        if others and max(others) < _MOST_FORCED:
            self.cost.note(plan.num_logits, seconds, sum(others))

    def may_draft(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether the next step may have drafts for any of the `sequences`."""
        return self.is_used and any(self._wish(seq) is not None for seq in sequences)

    def _wishes(self, sequences: Iterable[Sequence]) -> list[DraftRequest]:
        return [wish for seq in sequences if (wish := self._wish(seq)) is not None]

    def _wish(self, seq: Sequence) -> DraftRequest | None:
        wanted = self._wanted(seq)
        if not wanted or not _may_draft(seq):
            return None
        limit = min(MOST_DRAFTS if wanted == AUTO_DRAFTS else wanted, seq.max_len - len(seq.tokens) - 1)
        is_free = wanted == AUTO_DRAFTS or self.cost.num_steps >= ENOUGH_STEPS
        return DraftRequest(seq, limit, is_free) if limit > 0 else None


def _told(wish: DraftRequest) -> tuple[int, ...]:
    """Return the draft tokens that the controller got in advance. If the controller has answered already, only the
    draft tokens that it predicted are returned."""
    seq, pool = wish.seq, wish.seq.control.pool
    tokens = (seq.drafts.foretold or ())[: wish.limit]
    if tokens and seq.control.answer is not None and pool is not None:
        return tokens[: len(pool.lookahead(seq.id, tokens))]
    return tokens


def _may_draft(seq: Sequence) -> bool:
    """Return whether the next tokens of `seq` can be drafted. The sequence must be decoding with no missing
    log-probability, and its controller must support lookahead."""
    if seq.kv.is_prefilling or seq.request.embeds:
        return False
    if seq.is_controlled and (seq.sampling.lookahead or seq.output.aligned or not _is_foreseen(seq)):
        return False
    if seq.output.ending is not None or seq.wants_scores:
        return False
    if (healing := seq.request.healing) is not None and healing.mask_after(seq.tokens, seq.num_prompt) is not None:
        return False
    if (
        seq.is_controlled and seq.output.text is not None and seq.output.text.may_go
    ):  # it hears of each draw before one takes others back
        return False
    if seq.sampling.has_mirostat:  # each sampled token changes the candidates of the next one
        return False
    return seq.draws.was_forked or seq.sampling.n == 1


def _is_foreseen(seq: Sequence) -> bool:
    """Return whether the controller of `seq` may be asked for lookahead, or was already asked."""
    pool = seq.control.pool
    can = frozenset() if pool is None else pool.capabilities
    if not getattr(seq.request.controller, "is_pure", True) or "lookahead" not in can:
        return False
    return seq.drafts.foretold is not None or "remote_lookahead" not in can
