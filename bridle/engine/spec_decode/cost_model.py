"""Selects the drafts that are worth their cost. The rule of `Speculation` is computed from probabilities and times."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.proposers import Proposer

#: Maximum length of a draft if the engine decides the length.
MOST_DRAFTS = 16
#: Factors by which a draft's value must exceed its cost, because both are estimates. The second factor is for batches:
#: a token that only one sequence gains does not end the step sooner.
_MARGIN, _MARGIN_AMONG_OTHERS = 1.1, 0.2
#: Maximum number of further tokens that an output is expected to have.
_FORESEEN = 128


@dataclass(slots=True)
class DraftRequest:
    """A sequence that may get up to `limit` draft tokens. With `is_free`, the sequence gets only as many draft tokens
    as are worth their cost; otherwise it gets `limit`."""

    seq: Sequence
    limit: int
    is_free: bool


@dataclass(slots=True)
class DraftProposal:
    """A draft in parts. A draft is a list of parts, each with one guessed token and the tokens that are forced after
    it. One more token is sampled after the last part."""

    wish: DraftRequest
    parts: list[tuple[int, ...]]
    chance: float  # probability that a guessed token is right if those before it are
    is_paid: bool = False  # its proposer's time was already spent and is not a cost
    asking: float = 0.0  # seconds to ask the controller about a part

    def tokens(self, num_parts: int) -> tuple[int, ...]:
        """Return the tokens of the first `num_parts` parts of the draft."""
        return tuple(token for part in self.parts[:num_parts] for token in part)


@dataclass(slots=True)
class BaseStep:
    """The step to which draft tokens are added. `row` and `other` are the seconds of one more row and of one more token
    without logits. `num_sure` is the number of tokens that the step gives without drafts."""

    seconds: float
    row: float
    other: float
    num_sure: int
    room: int

    @property
    def margin(self) -> float:
        """Return the factor by which the value of a draft must exceed its cost."""
        return _MARGIN + _MARGIN_AMONG_OTHERS * (1.0 - 1.0 / max(self.num_sure, 1))

    def cost(self, size: float, chance: float) -> float:
        """Return the seconds that a draft part of `size` tokens costs. The first token of a part is a guess that is
        right with probability `chance`. If the guess is right, the other tokens would be computed anyway, but without
        logits."""
        return self.row * size - chance * self.other * (size - 1)


def depth_worth(chance: float, cost: float, step: BaseStep, num_alike: int) -> int:
    """Return how many tokens to draft for each of `num_alike` sequences. A token is accepted with probability `chance`
    and costs `cost` seconds. The number grows while one more token for each sequence increases the tokens per
    second."""
    expected, seconds, margin = float(step.num_sure), step.seconds, step.margin
    for depth in range(MOST_DRAFTS):
        likely = chance ** (depth + 1)
        if likely * seconds <= margin * cost * expected:
            return depth
        expected += likely * num_alike
        seconds += cost * num_alike
    return MOST_DRAFTS


def best_pace(chance: float, cost: float, step: BaseStep, limit: int) -> float:
    """Return the highest tokens per second of a step in which one sequence gets up to `limit` draft tokens. Each draft
    token is accepted with probability `chance` and costs `cost` seconds."""
    expected, seconds = float(step.num_sure), step.seconds
    best = expected / seconds
    for depth in range(1, min(limit, MOST_DRAFTS) + 1):
        expected += chance**depth
        seconds += cost
        best = max(best, expected / seconds)
    return best


def repays(behind: float, seq: Sequence, count: int, chance: float, cost: float, step: BaseStep) -> bool:
    """Return whether drafting saves more time than the `behind` seconds that the proposer first needs to process the
    sequence. The proposer offers `count` draft tokens per step, and each costs `cost` seconds."""
    if not behind:
        return True
    tokens = 1.0 + sum(chance**depth for depth in range(1, count + 1))
    saved = step.seconds - (step.seconds + count * cost) / tokens  # seconds saved per token
    return saved * min(seq.max_len - len(seq.tokens), _FORESEEN) > step.margin * behind


def worthy(wishes: list[DraftRequest], step: BaseStep) -> list[DraftRequest]:
    """Return all draft requests, if one more row of the step is cheap enough for any draft. If one more row is too
    expensive, return only the requests with a fixed number of draft tokens."""
    if step.margin * step.row * step.num_sure < step.seconds:
        return wishes
    return [wish for wish in wishes if not wish.is_free]


def worth_asking(
    wishes: list[DraftRequest], chances: dict[int, float], model: Proposer, step: BaseStep
) -> dict[int, int]:
    """Return how many tokens a draft model should draft for each sequence. The number grows while one more token for
    all sequences increases the tokens per second. The cost of rows and of the draft model is considered."""
    counts: dict[int, int] = {}
    expected, seconds, room, margin = float(step.num_sure), step.seconds, step.room, step.margin
    going, place = wishes, 0
    while going:
        place += 1
        each = step.row + model.seconds(len(going)) / len(going)
        likely = [(wish, chances[wish.seq.id] ** place) for wish in going]
        kept = [
            (wish, chance)
            for wish, chance in likely
            if place <= wish.limit and (not wish.is_free or chance * seconds > margin * each * expected)
        ][:room]
        for wish, chance in kept:
            counts[wish.seq.id] = place
            expected += chance
        seconds += each * len(kept)
        room -= len(kept)
        going = [wish for wish, _ in kept]
    return counts


def fitting(parts: list[tuple[int, ...]], limit: int, room: int) -> list[tuple[int, ...]]:
    """Return the first parts of a draft that fit: at most `limit` parts with at most `room` tokens in total."""
    ends = accumulate(map(len, parts))
    return [part for part, end in zip(parts[:limit], ends, strict=False) if end <= room]


def worth_while(guesses: list[DraftProposal], step: BaseStep) -> dict[int, int]:
    """Return how many parts of each draft to compute. Parts that were requested or paid for earlier always count. Other
    parts of drafts are added in the order of their probability, while each part increases the tokens per second."""
    counts: dict[int, int] = {}
    expected, seconds, room, margin = float(step.num_sure), step.seconds, step.room, step.margin
    free: list[tuple[float, int, int]] = []
    for guess in guesses:
        chances = [guess.chance ** (place + 1) for place in range(len(guess.parts))]
        if guess.wish.is_free and not guess.is_paid:
            sizes = map(len, guess.parts)
            free += [(-chance, guess.wish.seq.id, size) for chance, size in zip(chances, sizes, strict=True)]
            continue
        counts[guess.wish.seq.id] = taken = len(fitting(guess.parts, len(guess.parts), room))
        room -= len(guess.tokens(taken))
        expected += sum(chances[:taken])
        seconds += step.row * taken
    asking = {guess.wish.seq.id: guess.asking for guess in guesses}
    full: set[int] = set()
    for chance, seq_id, size in sorted(free, key=lambda each: each[0]):
        cost = step.cost(size, -chance) + asking[seq_id]
        if seq_id in full or size > room or -chance * seconds <= margin * cost * expected:
            full.add(seq_id)
            continue
        counts[seq_id] = counts.get(seq_id, 0) + 1
        room, expected, seconds = room - size, expected - chance, seconds + cost
    return counts
