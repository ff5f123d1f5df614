"""How many tokens of which sequences are drafted, so that one pass may give several tokens of one sequence.

A draft costs a row of the step, and gives a token if it is the one that is drawn. It never changes what is drawn: each
drafted position draws with its own number and key, as it would have later, and a draft that is not what was drawn is
forgotten, with all that follow it (`Branching`). So this module decides about time alone.

A request may ask for a number of drafts at once. Left to the engine (`AUTO`), a draft is worth its row if the chance
that it is right, by what was right of late, exceeds the share of the step that a row takes, times the tokens that the
step gives anyway. A full batch, whose rows are not cheap and whose tokens are many, thus gets none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bridle.engine.interfaces import ForesightedPool
from bridle.engine.lookup import Lookup
from bridle.engine.sequence import Sequence
from bridle.errors import InvalidRequest
from bridle.sampling import AUTO_DRAFTS, MAX_DRAFTS

#: The most tokens that are drafted at once where the engine decides.
_MOST = 16
#: What is known of a sequence's drafts before there was any: as if one of two had been right.
_PRIOR_RIGHT, _PRIOR_TRIED = 0.6, 1.0
#: What old drafts still count after another one, and after a step in which none was tried.
_MEMORY, _FADING = 0.95, 0.99
#: Tokens of a text that are made searchable in one step.
_MOST_INDEXED = 4096

Drafts = dict[int, tuple[int, ...]]


class StepCost:
    """Seconds of a step as a line over its tokens, fitted to the steps of late."""

    #: A row is taken to cost this share of a step until steps of different sizes were seen.
    FIRST_SHARE = 0.1

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take one step in."""
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", num_tokens),
            ("_seconds", seconds),
            ("_squares", num_tokens * num_tokens),
            ("_products", num_tokens * seconds),
        ):
            setattr(self, name, 0.98 * getattr(self, name) + value)

    def of_row(self) -> float:
        """Seconds that one more token costs."""
        if not self._weight:
            return self.FIRST_SHARE
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - tokens * tokens
        if spread < 0.25:
            return self.FIRST_SHARE * seconds
        return max((self._products / self._weight - tokens * seconds) / spread, 0.0)

    def of_step(self, num_tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        if not self._weight:
            return 1.0
        return max(self._seconds / self._weight + (num_tokens - self._tokens / self._weight) * self.of_row(), 1e-9)


@dataclass(slots=True)
class _Guess:
    seq: Sequence
    tokens: tuple[int, ...]
    chance: float  # that a drafted token is right if those before it are
    is_free: bool  # how many are worth it is for the engine to say


class Speculation:
    """Drafts for the sequences of a step. `default` is for requests that leave it to the server: a number of drafts,
    or `AUTO_DRAFTS`."""

    def __init__(self, default: int = 0) -> None:
        if not AUTO_DRAFTS <= default <= MAX_DRAFTS:
            raise InvalidRequest(f"speculate is {default}; must be between {AUTO_DRAFTS} and {MAX_DRAFTS}", "speculate")
        self._default = default
        self.is_used = default != 0  # whether any request has asked for drafts
        self.cost = StepCost()

    def is_wanted(self, sequences: Iterable[Sequence]) -> bool:
        """Whether any of the sequences asks for drafts. Costs are learned from then on."""
        self.is_used = self.is_used or any(map(self._wish, sequences))
        return self.is_used

    def _wish(self, seq: Sequence) -> int:
        """How many drafts the request of `seq` asks for."""
        wanted = seq.sampling.speculate
        if wanted is None:
            return AUTO_DRAFTS if seq.sampling.prediction_ids else self._default
        return wanted

    def limit(self, seq: Sequence) -> int:
        """How many tokens of `seq` may be drafted now; `AUTO_DRAFTS` if that is for the engine to say."""
        wanted = self._wish(seq)
        return wanted if wanted and _may_draft(seq) else 0

    def draft(self, sequences: Iterable[Sequence], num_tokens: int, room: int) -> Drafts:
        """Drafts for a step that computes `num_tokens` tokens and gives one of each sequence: at most `room` in all."""
        chosen = list(sequences)
        wanted = [(seq, limit) for seq in chosen if (limit := self.limit(seq))]
        if not wanted or room <= 0:
            return {}
        row, step = self.cost.of_row(), self.cost.of_step(num_tokens)
        if row * len(chosen) >= step:
            wanted = [(seq, limit) for seq, limit in wanted if limit != AUTO_DRAFTS]
        guesses = [guess for seq, limit in wanted if (guess := self._guess(seq, limit)) is not None]
        return _worth_while(guesses, row, step, len(chosen), room)

    def _guess(self, seq: Sequence, limit: int) -> _Guess | None:
        drafts = seq.drafts
        if drafts.lookup is None:
            drafts.lookup = Lookup(seq.sampling.prediction_ids[: seq.max_len])
        drafts.lookup.follow(seq.tokens, seq.num_prompt, _MOST_INDEXED)
        if len(drafts.lookup) < len(seq.tokens):
            return None
        is_free = limit == AUTO_DRAFTS
        most = min(_MOST if is_free else limit, seq.max_len - len(seq.tokens) - 1)
        tokens = drafts.lookup.draft(most) if most > 0 else ()
        if not tokens:
            return None
        chance = (drafts.num_right + _PRIOR_RIGHT) / (drafts.num_tried + _PRIOR_TRIED)
        drafts.num_right *= _FADING
        drafts.num_tried *= _FADING
        return _Guess(seq, tokens, min(chance, 1.0), is_free)

    def learn(self, seq: Sequence, num_drafted: int, num_right: int) -> None:
        """Note how many of the drafts of a step were drawn."""
        drafts = seq.drafts
        drafts.num_right = _MEMORY * drafts.num_right + num_right
        drafts.num_tried = _MEMORY * drafts.num_tried + min(num_right + 1, num_drafted)

    def forget(self, seq: Sequence) -> None:
        """Drop what can be looked up in a sequence that gives up its room: so much is kept as KV is."""
        seq.drafts.lookup = None

    def cut(self, seq: Sequence) -> None:
        """Note that tokens of `seq` were taken back."""
        if seq.drafts.lookup is not None:
            seq.drafts.lookup.cut(len(seq.tokens))


def _may_draft(seq: Sequence) -> bool:
    """Whether the next draws can be made ahead: it decodes, what steers it can foresee, no score is missing."""
    if seq.kv.is_prefilling or seq.request.embeds:
        return False
    if seq.is_controlled and not isinstance(seq.control.pool, ForesightedPool):
        return False
    if seq.output.ending is not None or seq.wants_scores:
        return False
    if seq.sampling.banned_phrases:  # a draw may take tokens back
        return False
    if seq.sampling.has_mirostat:  # each draw changes what the next one may choose
        return False
    return seq.draws.was_forked or seq.sampling.n == 1


def _worth_while(guesses: list[_Guess], row: float, step: float, num_sure: int, room: int) -> Drafts:
    """What of the guesses is computed: the number that was asked for, and of the others the likeliest tokens, as long
    as each gives more tokens a second than the step would without it."""
    counts: dict[int, int] = {}
    expected = float(num_sure)
    free: list[tuple[float, int]] = []
    for guess in guesses:
        chances = [guess.chance ** (place + 1) for place in range(len(guess.tokens))]
        if guess.is_free:
            free += [(-chance, guess.seq.id) for chance in chances]
            continue
        counts[guess.seq.id] = taken = min(len(chances), room)
        room -= taken
        expected += sum(chances[:taken])
        step += row * taken
    for chance, seq_id in sorted(free):
        if room <= 0 or -chance * step <= row * expected:
            break
        counts[seq_id] = counts.get(seq_id, 0) + 1
        room, expected, step = room - 1, expected - chance, step + row
    return {guess.seq.id: guess.tokens[:count] for guess in guesses if (count := counts.get(guess.seq.id, 0))}
