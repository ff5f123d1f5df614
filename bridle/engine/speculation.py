"""How many tokens of which sequences are drafted, so that one pass may give several tokens of one sequence.

A draft costs a row of the step, and the time of its drafter; it gives a token if it is the one that is drawn. It never
changes what is drawn: each drafted position draws with its own number and key, as it would have later, and a draft that
is not what was drawn is forgotten, with all that follow it (`Branching`). So this module decides about time alone.

A draft is worth its row if the chance that it is right, by what was right of late, exceeds the share of the step that
a row takes, times the tokens that the step gives anyway. A full batch, whose rows are not cheap and whose tokens are
many, thus gets none. What is copied from the text costs no time, so that it is guessed first and then weighed; a draft
model is weighed before it is run. A request may say how many drafts it wants at most: it gets these until steps have
shown what rows cost, and then as many of them as are worth it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bridle.engine.decision import Decision
from bridle.engine.draft_worth import (
    MOST_DRAFTS,
    Guess,
    Step,
    Wanted,
    depth_worth,
    fitting,
    worth_asking,
    worth_while,
    worthy,
)
from bridle.engine.drafters import Drafter, Drafts, LookupDrafter, ProposalDrafter, proposed
from bridle.engine.interfaces import foresees, is_foretold, leads
from bridle.engine.sequence import Sequence
from bridle.engine.step_cost import Average, StepCost, Tally
from bridle.errors import InvalidRequest
from bridle.sampling import AUTO_DRAFTS, MAX_DRAFTS

#: How often a draft model is expected to be right before it has drafted anything: somebody chose it.
_CHOSEN = 0.8
#: The least that a new sequence is expected to copy, however little others did: it may be of another kind.
_LEAST_COPIED = 0.2
#: The most tokens that controllers are told ahead in one step.
_MOST_TOLD = 64
#: Seconds that it takes to clone the guest of a controller that is far away, as was measured: for what is told to more
#: than one of them there has to be so much time in a step.
_CLONE_SECONDS = 1.25e-3
#: After so many steps it is known what rows cost.
_ENOUGH_STEPS = 16
#: After steps in which no draft was worth looking for none is looked for in so many further ones, at most.
_LONGEST_REST = 8
#: The same after steps in which the text said nothing.
_LONGEST_SILENCE = 3


@dataclass(slots=True)
class _Rest:
    """Steps in which the same sequences are not looked at, because no draft was worth looking for or none was found.
    Each rest is longer than the one before."""

    length: int = 0
    left: int = 0
    who: tuple[int, int] = (0, 0)  # how many sequences, and the last of them
    is_due: bool = False  # nothing was looked for in the step under way
    was_due: bool = False  # nor for those whose controllers are told ahead

    def begin(self, sequences: list[Sequence], longest: int) -> None:
        self.length = self.left = min(2 * self.length + 1, longest)
        self.who = len(sequences), sequences[-1].id

    def end(self) -> None:
        self.length = self.left = 0

    def holds(self, sequences: list[Sequence]) -> bool:
        """Whether the next step is one of rest."""
        return self.left > 0 and bool(sequences) and self.who == (len(sequences), sequences[-1].id)

    def goes_on(self, sequences: list[Sequence]) -> bool:
        """Whether this step is one of rest."""
        if not self.holds(sequences):
            self.left = 0
            return False
        self.left -= 1
        return True


class Speculation:
    """Drafts for the sequences of a step. `default` is for requests that leave it to the server: a number of drafts,
    `AUTO_DRAFTS`, or None: as many as pay if there is a draft `model`, else none."""

    def __init__(
        self,
        default: int | None = None,
        model: Drafter | None = None,
        vocab_size: int = 1 << 31,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        if default is not None and not AUTO_DRAFTS <= default <= MAX_DRAFTS:
            raise InvalidRequest(f"speculate is {default}; must be between {AUTO_DRAFTS} and {MAX_DRAFTS}", "speculate")
        self._default = default if default is not None else AUTO_DRAFTS if model is not None else 0
        self._proposals = ProposalDrafter(vocab_size)
        self._lookup = LookupDrafter()
        self._model = model
        self._drafters: tuple[Drafter, ...] = (self._proposals, self._lookup, *(() if model is None else (model,)))
        self._modelled, self._copied = Tally(), Tally()  # how often either was right, whatever the sequence
        self.is_used = self._default != 0  # whether any request has asked for drafts
        self._num_sequences = 1  # of the step that was planned last
        self._leading: dict[type, Average] = defaultdict(Average)  # by kind of controllers, seconds of a part
        self._sizes: dict[type, Average] = defaultdict(Average)  # and its rows
        self._foreseeing: dict[type, Average] = defaultdict(Average)
        self._seconds_ahead = 0.0  # spent on drafts beside their rows, since this was asked for
        self.timer = timer
        self._rest = _Rest()
        self._waiting = StepCost()  # of the engine for controllers that are far away, by how many tokens they were told
        self.cost = StepCost()

    def expect(self, seq: Sequence) -> None:
        """Note that a sequence begins. Once one asks for drafts, or has them proposed, costs are learned."""
        asked, predicted = seq.sampling.speculate, seq.sampling.prediction_ids
        self.is_used = self.is_used or bool(predicted if asked is None else asked)

    def _wanted(self, seq: Sequence) -> int:
        """How many drafts the request of `seq` asks for."""
        wanted = seq.sampling.speculate
        if wanted is None:
            has_proposal = seq.drafts.proposal is not None and bool(proposed(seq, 1))
            return AUTO_DRAFTS if seq.sampling.prediction_ids or has_proposal else self._default
        return wanted

    def hear(self, seq: Sequence, decision: Decision) -> None:
        """Take in what a controller proposes with its answer."""
        self._proposals.hear(seq, decision)
        if seq.drafts.proposal is not None:
            self.is_used = self.is_used or seq.sampling.speculate != 0
            self._rest.end()

    def foretell(self, sequences: Iterable[Sequence]) -> Drafts:
        """Drafts for the next step of sequences whose controllers are far away, to be told together with what they are
        asked now. `draft` gives no others for them."""
        if not self.is_used:
            return {}
        chosen = list(sequences)
        for seq in chosen:
            seq.drafts.told = ()
        if self._rest.holds(chosen):
            return {}
        wishes = self._wishes(chosen)
        if not wishes:
            return {}
        num_sequences = max(self._num_sequences, len(chosen))
        seconds = self.cost.of_step(num_sequences)
        step = Step(seconds, self.cost.of_row(), self.cost.of_other(), num_sequences, _MOST_TOLD)
        self._rest.is_due = all(wish.is_free for wish in wishes)
        wishes = worthy(wishes, step)
        has_time = not self._rest.is_due or len(chosen) == 1 or seconds > len(chosen) * _CLONE_SECONDS
        guesses = self._guess(wishes, step) if has_time else self._take_proposals(wishes)
        self._rest.was_due = self._rest.is_due and not guesses
        drafts = worth_while(guesses, step)
        for guess in guesses:
            state = guess.wish.seq.drafts
            state.told, state.chance = guess.tokens(drafts.get(guess.wish.seq.id, 0)), guess.chance
        return {guess.wish.seq.id: told for guess in guesses if (told := guess.wish.seq.drafts.told)}

    def draft(self, sequences: Iterable[Sequence], num_tokens: int, room: int) -> Drafts:
        """Drafts for a step that computes `num_tokens` tokens and gives one of each sequence: at most `room` in all."""
        chosen = list(sequences)
        self._num_sequences = len(chosen)
        if room <= 0 or self._rest.goes_on(chosen):
            return {}
        wishes = self._wishes(chosen)
        if not wishes:
            return {}
        are_free = self._rest.is_due = all(wish.is_free for wish in wishes)
        seconds = self.cost.of_step(len(chosen), num_tokens - len(chosen))
        step = Step(seconds, self.cost.of_row(), self.cost.of_other(), len(chosen), room)
        wishes = worthy(wishes, step)
        told = [wish for wish in wishes if wish.seq.drafts.told is not None]
        guesses = [Guess(wish, _singles(tokens), wish.seq.drafts.chance) for wish in told if (tokens := _told(wish))]
        guesses += self._guess([wish for wish in wishes if wish.seq.drafts.told is None] if told else wishes, step)
        if guesses:
            self._rest.end()
        elif self._rest.is_due and (self._rest.was_due or not told):
            self._rest.begin(chosen, _LONGEST_REST)
        elif are_free and not told:
            self._rest.begin(chosen, _LONGEST_SILENCE)
        drafts, counts = {}, worth_while(guesses, step)
        for guess in guesses:
            seq, taken = guess.wish.seq, counts.get(guess.wish.seq.id, 0)
            if taken:
                drafts[seq.id] = guess.tokens(taken)
                seq.drafts.sizes = tuple(map(len, guess.parts[:taken]))
            elif guess.parts and seq.drafts.source is seq.drafts.copied:
                self._watch(seq, guess.parts[0])
        return drafts

    def may_draft(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the next step may have drafts for any of them."""
        return self.is_used and any(self._wish(seq) is not None for seq in sequences)

    def _wishes(self, sequences: Iterable[Sequence]) -> list[Wanted]:
        return [wish for seq in sequences if (wish := self._wish(seq)) is not None]

    def _guess(self, wishes: list[Wanted], step: Step) -> list[Guess]:
        """What drafters say, each about what those before it say nothing about."""
        guesses = self._take_proposals(wishes)
        guesses += self._look_up(_others(wishes, guesses), step)
        if self._model is not None:
            guesses += self._ask(self._model, _others(wishes, guesses), step)
        return guesses

    def _wish(self, seq: Sequence) -> Wanted | None:
        wanted = self._wanted(seq)
        if not wanted or not _may_draft(seq):
            return None
        limit = min(MOST_DRAFTS if wanted == AUTO_DRAFTS else wanted, seq.max_len - len(seq.tokens) - 1)
        is_free = wanted == AUTO_DRAFTS or self.cost.num_steps >= _ENOUGH_STEPS
        return Wanted(seq, limit, is_free) if limit > 0 else None

    def _take_proposals(self, wishes: list[Wanted]) -> list[Guess]:
        """What controllers propose."""
        found = self._proposals.draft((wish.seq, wish.limit) for wish in wishes)
        guesses = []
        for wish in wishes:
            if wish.seq.id in found:
                drafts = wish.seq.drafts
                drafts.source = drafts.proposed
                guesses.append(
                    Guess(
                        wish,
                        self._lead(wish.seq, found[wish.seq.id], wish.limit),
                        drafts.proposed.chance,
                        asking=self._asking(wish.seq),
                    )
                )
                drafts.proposed.fade()
        return guesses

    def _look_up(self, wishes: list[Wanted], step: Step) -> list[Guess]:
        """What the text itself says, where that was right as often as the draft model is, and often enough to pay.
        Elsewhere it is only watched."""
        chances = self._copied_chances([wish.seq for wish in wishes])
        ranked = sorted(chances.values())
        room, guesses = step.room, []
        for wish in sorted(wishes, key=lambda wish: -chances[wish.seq.id]):
            seq, chance = wish.seq, chances[wish.seq.id]
            num_alike = len(ranked) - bisect_left(ranked, chance)
            cost = self._asking(seq) + step.cost(max(self._sizes[type(seq.control.pool)].each, 1.0), chance)
            depth = depth_worth(chance, cost, step, num_alike) if wish.is_free else wish.limit
            if not depth:
                self._foreseeing[type(seq.control.pool)].fade()
            if not depth or (self._model is not None and chance < self._model_chance(seq)):
                self._watch(seq, self._copy(seq, 1))
                continue
            self._rest.is_due = False
            limit = wish.limit
            if seq.is_controlled:  # asking it takes time: no further than there is room for
                limit = min(limit, depth, -(-max(room, 0) // num_alike))
            if tokens := self._copy(seq, limit):
                seq.drafts.source = seq.drafts.copied
                parts = self._lead(seq, tokens, limit)
                guesses.append(Guess(wish, parts, chance, asking=self._asking(seq)))
                room -= sum(map(len, parts)) if seq.is_controlled else 0
        return guesses

    def _copied_chances(self, sequences: Iterable[Sequence]) -> dict[int, float]:
        """That what the text says is right, by sequence id: by this sequence, and before that by all others."""
        num_steps = self._rest.length + 1
        self._copied.fade(num_steps)
        chances = {}
        for seq in sequences:
            self._settle_watched(seq)
            chances[seq.id] = seq.drafts.copied.chance_among(self._copied, _LEAST_COPIED, self._num_sequences)
            seq.drafts.copied.fade(num_steps)
        return chances

    def _copy(self, seq: Sequence, limit: int) -> tuple[int, ...]:
        return self._lookup.draft([(seq, limit)]).get(seq.id, ())

    def _watch(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        """Remember what the text says comes next where that is not computed: whether it was right is learnt for
        nothing."""
        seq.drafts.watched = (len(seq.tokens), tokens[0]) if tokens else None

    def _settle_watched(self, seq: Sequence) -> None:
        """Hold the last guess that was only watched against the token that came."""
        watched, seq.drafts.watched = seq.drafts.watched, None
        if watched is not None and watched[0] < len(seq.tokens):
            is_right = int(seq.tokens[watched[0]] == watched[1])
            seq.drafts.copied.note(1, is_right)
            self._copied.note(1, is_right)

    def _lead(self, seq: Sequence, tokens: tuple[int, ...], limit: int) -> list[tuple[int, ...]]:
        """The guessed tokens that the controller of a sequence allows, as far as it says, with those that it forces.
        Where these are others than were guessed, the text is asked how it goes on after them."""
        pool = seq.control.pool
        if not tokens or not leads(pool):
            return _singles(tokens)
        began = self.timer()
        parts: list[tuple[int, ...]] = []
        room = seq.max_len - len(seq.tokens) - 1
        while tokens:
            found, is_other = pool.lead(seq.id, tokens)
            parts += found
            if not is_other or len(parts) >= limit:
                break
            path = [token for part in parts for token in part]
            tokens = self._lookup.draft_after(seq, path, min(limit - len(parts), room - len(path)))
        spent = self.timer() - began
        self._leading[type(pool)].note(max(len(parts), 1), spent)
        self._sizes[type(pool)].note(len(parts), sum(map(len, parts)))
        self._seconds_ahead += spent
        return fitting(parts, limit, room)

    def _asking(self, seq: Sequence) -> float:
        """Seconds that it takes to ask what steers `seq` about a drafted token."""
        if not seq.is_controlled:
            return 0.0
        if seq.drafts.told is not None:
            return self._waiting.of_row()
        kind = type(seq.control.pool)
        return self._leading[kind].each + self._foreseeing[kind].each

    def note_foreseen(self, seq: Sequence, num_known: int, seconds: float) -> None:
        """Note how long it took to ask what steers `seq` about the drafts of a step."""
        self._foreseeing[type(seq.control.pool)].note(max(num_known, 1), seconds)
        self._seconds_ahead += seconds

    def note_waited(self, sequences: Iterable[Sequence], seconds: float) -> None:
        """Note how long a step waited for controllers that are far away."""
        told = [seq.drafts.told for seq in sequences if seq.drafts.told is not None]
        if told:
            self._waiting.note(sum(map(len, told)), seconds)

    def take_seconds_ahead(self) -> float:
        """Seconds since the last call that drafters and foreseeing took: they are no cost of rows."""
        seconds, self._seconds_ahead = self._seconds_ahead, 0.0
        return seconds

    def _ask(self, model: Drafter, wishes: list[Wanted], step: Step) -> list[Guess]:
        """What the draft model says, as far ahead as it is worth its time."""
        chances = {wish.seq.id: self._model_chance(wish.seq) for wish in wishes}
        counts = worth_asking(wishes, chances, model, step)
        self._rest.is_due &= not counts
        num_steps = self._rest.length + 1
        self._modelled.fade(num_steps)
        began = self.timer()
        found = model.draft((wish.seq, counts[wish.seq.id]) for wish in wishes if wish.seq.id in counts)
        self._seconds_ahead += self.timer() - began
        guesses = []
        for wish in wishes:
            drafts = wish.seq.drafts
            if wish.seq.id in found:
                drafts.source = drafts.modelled
                parts = self._lead(wish.seq, found[wish.seq.id], wish.limit)
                guesses.append(Guess(wish, parts, chances[wish.seq.id], is_paid=True))
            drafts.modelled.fade(num_steps)
        return guesses

    def _model_chance(self, seq: Sequence) -> float:
        """That what the draft model says is right: by this sequence, and before that by all others."""
        return seq.drafts.modelled.chance_from(self._modelled.chance_from(_CHOSEN))

    def learn(self, seq: Sequence, num_drafted: int, num_right: int) -> None:
        """Note how many of the drafts of a step were drawn."""
        source = seq.drafts.source or seq.drafts.copied
        source.note(num_drafted, num_right)
        if source is seq.drafts.modelled:
            self._modelled.note(num_drafted, num_right)
        elif source is seq.drafts.copied:
            self._copied.note(num_drafted, num_right)

    def forget(self, seq: Sequence) -> None:
        """Drop what drafters keep of a sequence that is over or gives up its room."""
        for drafter in self._drafters:
            drafter.forget(seq)

    def cut(self, seq: Sequence) -> None:
        """Note that tokens of `seq` were taken back."""
        seq.drafts.watched = None
        for drafter in self._drafters:
            drafter.cut(seq)

    def close(self) -> None:
        """Release what drafters hold."""
        for drafter in self._drafters:
            drafter.close()


def _told(wish: Wanted) -> tuple[int, ...]:
    """The drafts that the controller was told of; if it has answered already, those that it could foresee."""
    seq, pool = wish.seq, wish.seq.control.pool
    tokens = (seq.drafts.told or ())[: wish.limit]
    if tokens and seq.control.answer is not None and foresees(pool):
        return tokens[: len(pool.foresee(seq.id, tokens))]
    return tokens


def _others(wishes: list[Wanted], guesses: list[Guess]) -> list[Wanted]:
    """The wishes for which there is no guess."""
    guessed = {guess.wish.seq.id for guess in guesses}
    return [wish for wish in wishes if wish.seq.id not in guessed]


def _may_draft(seq: Sequence) -> bool:
    """Whether the next draws can be made ahead: it decodes, what steers it can foresee, no score is missing."""
    if seq.kv.is_prefilling or seq.request.embeds:
        return False
    if seq.is_controlled and not _is_foreseen(seq):
        return False
    if seq.output.ending is not None or seq.wants_scores:
        return False
    if (
        seq.is_controlled and seq.output.text is not None and seq.output.text.may_go
    ):  # it hears of each draw before one takes others back
        return False
    if seq.sampling.has_mirostat:  # each draw changes what the next one may choose
        return False
    return seq.draws.was_forked or seq.sampling.n == 1


def _is_foreseen(seq: Sequence) -> bool:
    """Whether what steers `seq` may be asked ahead, or was."""
    pool = seq.control.pool
    if not getattr(seq.request.controller, "is_pure", True) or not foresees(pool):
        return False
    return seq.drafts.told is not None or not is_foretold(pool)


def _singles(tokens: Iterable[int]) -> list[tuple[int, ...]]:
    return [(token,) for token in tokens]
