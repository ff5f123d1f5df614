"""Chooses the proposer for each sequence. Controllers filter the drafts, and the acceptance rate of each proposer is
measured.

A proposal of the controller is used first, then a copy from the text, then the draft model. `Speculation` decides which
drafts are worth their cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import ControllerPool
from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.cost_model import (
    BaseStep,
    DraftProposal,
    DraftRequest,
    best_pace,
    depth_worth,
    fitting,
    repays,
    worth_asking,
)
from bridle.engine.spec_decode.proposers import ControllerProposer, NgramProposer, Proposer
from bridle.engine.spec_decode.step_cost import AcceptanceRate, Average, StepCost

#: Expected acceptance rate of a draft model before it has drafted anything. The rate is high because the operator chose
#: the model.
_CHOSEN = 0.8
#: Minimum acceptance rate of copies that is expected of a new sequence, because it may differ from earlier ones.
_LEAST_COPIED = 0.2


@dataclass(slots=True)
class DraftBackoff:
    """Pauses drafting for the same sequences after steps in which no draft token was useful. Each pause is longer than
    the pause before."""

    length: int = 0
    left: int = 0
    who: tuple[int, int] = (0, 0)  # number of sequences, and the id of the last one
    is_due: bool = False  # the search for drafts is paused in this step
    was_due: bool = False  # paused also for controllers that get drafts ahead

    def begin(self, sequences: list[Sequence], longest: int) -> None:
        self.length = self.left = min(2 * self.length + 1, longest)
        self.who = len(sequences), sequences[-1].id

    def end(self) -> None:
        self.length = self.left = 0

    def holds(self, sequences: list[Sequence]) -> bool:
        """Return whether the next step pauses drafting."""
        return self.left > 0 and bool(sequences) and self.who == (len(sequences), sequences[-1].id)

    def goes_on(self, sequences: list[Sequence]) -> bool:
        """Return whether this step pauses drafting, and count it."""
        if not self.holds(sequences):
            self.left = 0
            return False
        self.left -= 1
        return True


@dataclass(slots=True)
class _AskingCost:
    """Average cost of asking a controller pool about one part of a draft. The cost consists of the seconds to filter
    the part, its rows, and the seconds to predict the controller's answer."""

    filtering: Average = field(default_factory=Average)
    size: Average = field(default_factory=Average)
    predicting: Average = field(default_factory=Average)


class ProposerSelector:
    """Gets drafts from the proposers, and learns their costs and acceptance rates. `rest` pauses drafting after useless
    drafts."""

    def __init__(self, model: Proposer | None, vocab_size: int, timer: Callable[[], float], rest: DraftBackoff) -> None:
        self._proposals = ControllerProposer(vocab_size)
        self._lookup = NgramProposer()
        self._model = model
        self._proposers: tuple[Proposer, ...] = (self._proposals, self._lookup, *(() if model is None else (model,)))
        self._modelled, self._copied = AcceptanceRate(), AcceptanceRate()  # over all sequences
        self.num_sequences = 1  # number of sequences in the step that was planned last
        self._asked: dict[ControllerPool | None, _AskingCost] = defaultdict(_AskingCost)
        self._seconds_ahead = 0.0  # seconds spent on drafts, in addition to their rows, since `take_seconds_ahead`
        self.timer = timer
        self._rest = rest
        self._waiting = StepCost()  # the engine's waits for remote controllers, by the number of tokens sent ahead

    def on_decision(self, seq: Sequence, decision: Decision) -> None:
        """Record the tokens that a controller proposes with its answer."""
        self._proposals.on_decision(seq, decision)

    def guess(self, wishes: list[DraftRequest], step: BaseStep) -> list[DraftProposal]:
        """Return the drafts of all proposers. Each proposer drafts only for sequences that have no draft from an
        earlier proposer."""
        guesses = self.take_proposals(wishes)
        guesses += self._look_up(_others(wishes, guesses), step)
        if self._model is not None:
            guesses += self._ask(self._model, _others(wishes, guesses), step)
        return guesses

    def take_proposals(self, wishes: list[DraftRequest]) -> list[DraftProposal]:
        """Return the drafts that controllers proposed."""
        found = self._proposals.propose((wish.seq, wish.limit) for wish in wishes)
        guesses = []
        for wish in wishes:
            if wish.seq.id in found:
                drafts = wish.seq.drafts
                drafts.source = drafts.proposed
                guesses.append(
                    DraftProposal(
                        wish,
                        self._lead(wish.seq, found[wish.seq.id], wish.limit),
                        drafts.proposed.chance,
                        asking=self._asking(wish.seq),
                    )
                )
                drafts.proposed.decay()
        return guesses

    def _look_up(self, wishes: list[DraftRequest], step: BaseStep) -> list[DraftProposal]:
        """Return drafts copied from the text, if recent copies were accepted often enough to be worth their cost. If
        copies were accepted too rarely, only their acceptance rate is measured."""
        chances = self._copied_chances([wish.seq for wish in wishes])
        ranked = sorted(chances.values())
        room, guesses = step.room, []
        for wish in sorted(wishes, key=lambda wish: -chances[wish.seq.id]):
            seq, chance = wish.seq, chances[wish.seq.id]
            num_alike = len(ranked) - bisect_left(ranked, chance)
            cost = self._asking(seq) + step.cost(max(self._asked[seq.control.pool].size.each, 1.0), chance)
            depth = depth_worth(chance, cost, step, num_alike) if wish.is_free else wish.limit
            if not depth:
                self._asked[seq.control.pool].predicting.fade()
            if not depth or self._is_faster_modelled(wish, chance, cost, step):
                self.track_unverified(seq, self._copy(seq, 1))
                continue
            self._rest.is_due = False
            limit = wish.limit
            if seq.is_controlled:  # asking the controller takes time, so the draft is limited to the room
                limit = min(limit, depth, -(-max(room, 0) // num_alike))
            if tokens := self._copy(seq, limit):
                seq.drafts.source = seq.drafts.copied
                parts = self._lead(seq, tokens, limit)
                guesses.append(DraftProposal(wish, parts, chance, asking=self._asking(seq)))
                room -= sum(map(len, parts)) if seq.is_controlled else 0
        return guesses

    def _is_faster_modelled(self, wish: DraftRequest, chance: float, cost: float, step: BaseStep) -> bool:
        """Return whether the draft model, including its running time, gives more tokens per second than a copy."""
        if self._model is None:
            return False
        own = step.row + self._model.seconds(1)
        modelled = best_pace(self._model_chance(wish.seq), own, step, wish.limit)
        return modelled > best_pace(chance, cost, step, wish.limit)

    def _copied_chances(self, sequences: Iterable[Sequence]) -> dict[int, float]:
        """Return, by sequence id, the probability that a copied token is right. The probability is estimated from the
        copies of the sequence, and also from all sequences while these copies are few."""
        num_steps = self._rest.length + 1
        self._copied.decay(num_steps)
        chances = {}
        for seq in sequences:
            self._settle_watched(seq)
            chances[seq.id] = seq.drafts.copied.chance_among(self._copied, _LEAST_COPIED, self.num_sequences)
            seq.drafts.copied.decay(num_steps)
        return chances

    def _copy(self, seq: Sequence, limit: int) -> tuple[int, ...]:
        return self._lookup.propose([(seq, limit)]).get(seq.id, ())

    def track_unverified(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        """Remember the next token of a copy without drafting it. Comparing the token later gives the accuracy of copies
        at no cost."""
        seq.drafts.watched = (len(seq.tokens), tokens[0]) if tokens else None

    def _settle_watched(self, seq: Sequence) -> None:
        """Compare the last remembered token with the token that was sampled at its position."""
        watched, seq.drafts.watched = seq.drafts.watched, None
        if watched is not None and watched[0] < len(seq.tokens):
            is_right = int(seq.tokens[watched[0]] == watched[1])
            seq.drafts.copied.note(1, is_right)
            self._copied.note(1, is_right)

    def _lead(self, seq: Sequence, tokens: tuple[int, ...], limit: int) -> list[tuple[int, ...]]:
        """Return the guessed tokens that the controller of the sequence allows, together with tokens that it forces. If
        the controller forces other tokens than the guessed ones, the text is searched again after the forced tokens."""
        pool = seq.control.pool
        if not tokens or pool is None or "draft_filtering" not in pool.capabilities:
            return singles(tokens)
        began = self.timer()
        parts: list[tuple[int, ...]] = []
        room = seq.max_len - len(seq.tokens) - 1
        while tokens:
            found, is_other = pool.filter_draft(seq.id, tokens)
            parts += found
            if not is_other or len(parts) >= limit:
                break
            path = [token for part in parts for token in part]
            tokens = self._lookup.propose_after(seq, path, min(limit - len(parts), room - len(path)))
        spent = self.timer() - began
        self._asked[pool].filtering.note(max(len(parts), 1), spent)
        self._asked[pool].size.note(len(parts), sum(map(len, parts)))
        self._seconds_ahead += spent
        return fitting(parts, limit, room)

    def _asking(self, seq: Sequence) -> float:
        """Return the seconds that asking the controller of `seq` about a draft token takes."""
        if not seq.is_controlled:
            return 0.0
        if seq.drafts.foretold is not None:
            return self._waiting.of_row()
        cost = self._asked[seq.control.pool]
        return cost.filtering.each + cost.predicting.each

    def note_foreseen(self, seq: Sequence, num_known: int, seconds: float) -> None:
        """Record how long the lookahead of the controller of `seq` took for the drafts of a step."""
        self._asked[seq.control.pool].predicting.note(max(num_known, 1), seconds)
        self._seconds_ahead += seconds

    def note_waited(self, sequences: Iterable[Sequence], seconds: float) -> None:
        """Record how long a step waited for remote controllers."""
        told = [seq.drafts.foretold for seq in sequences if seq.drafts.foretold is not None]
        if told:
            self._waiting.note(sum(map(len, told)), seconds)

    def take_seconds_ahead(self) -> float:
        """Return the seconds that drafting and lookahead took since the last call. The time of drafting and lookahead
        does not count as the cost of rows."""
        seconds, self._seconds_ahead = self._seconds_ahead, 0.0
        return seconds

    def _ask(self, model: Proposer, wishes: list[DraftRequest], step: BaseStep) -> list[DraftProposal]:
        """Return drafts from the draft model for those sequences whose drafts are worth the model's time."""
        chances = {wish.seq.id: self._model_chance(wish.seq) for wish in wishes}
        counts = worth_asking(wishes, chances, model, step)
        cost = step.row + model.seconds(1)
        for wish in wishes:
            seq, count = wish.seq, counts.get(wish.seq.id, 0)
            behind = model.seconds_behind(seq) if count and wish.is_free else 0.0
            if not repays(behind, seq, count, chances[seq.id], cost, step):
                del counts[seq.id]
        self._rest.is_due &= not counts
        num_steps = self._rest.length + 1
        self._modelled.decay(num_steps)
        began = self.timer()
        found = model.propose((wish.seq, counts[wish.seq.id]) for wish in wishes if wish.seq.id in counts)
        self._seconds_ahead += self.timer() - began
        guesses = []
        for wish in wishes:
            drafts = wish.seq.drafts
            if wish.seq.id in found:
                drafts.source = drafts.modelled
                parts = self._lead(wish.seq, found[wish.seq.id], wish.limit)
                guesses.append(DraftProposal(wish, parts, chances[wish.seq.id], is_paid=True))
            drafts.modelled.decay(num_steps)
        return guesses

    def _model_chance(self, seq: Sequence) -> float:
        """Return the probability that a token of the draft model is right. The probability is estimated from this
        sequence, and also from all sequences while its drafts are few."""
        return seq.drafts.modelled.chance_from(self._modelled.chance_from(_CHOSEN))

    def learn(self, seq: Sequence, num_drafted: int, num_right: int) -> None:
        """Record how many draft tokens of a step were accepted."""
        source = seq.drafts.source or seq.drafts.copied
        source.note(num_drafted, num_right)
        if source is seq.drafts.modelled:
            self._modelled.note(num_drafted, num_right)
        elif source is seq.drafts.copied:
            self._copied.note(num_drafted, num_right)

    def forget(self, seq: Sequence) -> None:
        """Drop the proposers' data about a sequence that has ended or was preempted."""
        for proposer in self._proposers:
            proposer.forget(seq)

    def cut(self, seq: Sequence) -> None:
        """Record that tokens of `seq` were rolled back."""
        seq.drafts.watched = None
        for proposer in self._proposers:
            proposer.cut(seq)

    def close(self) -> None:
        """Release the proposers' resources."""
        for proposer in self._proposers:
            proposer.close()


def _others(wishes: list[DraftRequest], guesses: list[DraftProposal]) -> list[DraftRequest]:
    """Return the draft requests that have no draft in `guesses`."""
    guessed = {guess.wish.seq.id for guess in guesses}
    return [wish for wish in wishes if wish.seq.id not in guessed]


def singles(tokens: Iterable[int]) -> list[tuple[int, ...]]:
    return [(token,) for token in tokens]
