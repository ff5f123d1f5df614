"""Verification of draft tokens: the sampling rows that they need, and how many of them equal the sampled tokens.

A draft token is accepted if it equals the token that is sampled at its position. Between sampled tokens there may be
forced tokens, which were computed together with the draft tokens. All tokens after the first rejected draft token are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Vectors
from dataclasses import dataclass
from itertools import accumulate

from bridle.engine.control.controller_manager import ControllerManager
from bridle.engine.control.decision import Branch
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.sampling.sample_rows import draw_row
from bridle.engine.scheduling.scheduler import Scheduled, Scheduler
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepResult
from bridle.engine.sequence import Sequence
from bridle.outputs import Logprob


@dataclass(slots=True)
class PlannedDraw:
    """A branch that is applied after sampling. Row `row` of the batch samples the branch's token; None if the branch
    does not sample. The rows after row `row` sample after each draft token of `item`. If the token is simply appended,
    `sample_row` also names this row."""

    seq: Sequence
    branch: Branch
    row: int | None
    item: Scheduled
    ways: Vectors[Branch] = ()  # branches along the drafts: samples, and forced tokens between them
    look: int | None = None  # row of the batch that gives candidates, if forced tokens after them count
    sample_row: int = -1


#: A draw. Nearly all draws are planned rows with a `sample_row`, because one more object for each would take time.
AnyDraw = Scheduled | PlannedDraw


def row_of(draw: AnyDraw) -> int | None:
    """Return the row of the batch that samples the token of a `PlannedDraw`, or None."""
    return draw.row if isinstance(draw, PlannedDraw) else draw.sample_row


@dataclass(slots=True)
class AcceptedDrafts:
    """The number of accepted draft tokens in a step, and how many of these were sampled (not forced)."""

    num_tokens: int = 0
    num_drawn: int = 0


#: Result for a row whose first draft was rejected.
NONE_RIGHT = AcceptedDrafts()


@dataclass(eq=False, repr=False)
class DraftVerifier:
    """Applies sampled tokens along the draft tokens. `accept_one` applies a single token."""

    _scheduler: Scheduler
    _steering: ControllerManager
    _progress: OutputProcessor
    _accept_one: Callable[[PlannedDraw, int, Logprob | None], None]

    def ways(self, item: Scheduled) -> list[Branch]:
        """Return the known branches after each draft token of the sequence. The list of branches ends at a fork or a
        splice."""
        plain: list[Branch] = []
        place = 1  # number of draft tokens before the next branch
        for way in self._steering.foresight.foresee(item.seq, item.drafts):
            forced = way.splices[0].ff_tokens if _is_forced(way) else ()
            is_other = forced != item.drafts[place : place + len(forced)]
            if is_other or (not forced and (way.splices or way.top_logprobs)):
                break
            plain.append(way)
            place += max(len(forced), 1)
        while plain and not plain[-1].sample:
            plain.pop()  # no token is sampled after it
        return plain

    def accept(self, draw: PlannedDraw, row: int, batch: SampleBatch, result: StepResult) -> AcceptedDrafts:
        """Apply the sampled tokens of a row with draft tokens in order, up to the first rejected one. Forced tokens
        between the sampled tokens are applied too."""
        right = AcceptedDrafts()
        ways = iter(draw.ways)
        while self._accept_draft(draw, row, result, right):
            way = next(ways, None)
            if way is not None and not way.sample:
                forced = way.splices[0].ff_tokens
                num_forced = self._force_drafted(draw.seq, forced)
                right.num_tokens += num_forced
                way = None if draw.seq.is_finished or num_forced < len(forced) else next(ways, None)
            if way is None:
                break
            if draw.seq.control.pool is not None:
                self._steering.foresight.tell(draw.seq, right.num_tokens)
            row += 1
            if draw.seq.is_traced:
                self._progress.note_drawn(draw.seq, batch.rows[row], result, row, is_draft=True)
        return right

    def _accept_draft(self, draw: PlannedDraw, row: int, result: StepResult, right: AcceptedDrafts) -> bool:
        """Apply one sampled token. Returns whether the token equals the draft token; if it does, the next draft token
        is compared."""
        seq, drafts = draw.seq, draw.item.drafts
        num_rewound = seq.output.usage.rewound_tokens
        self._accept_one(draw, result.tokens[row], result.logprobs[row])
        is_same = seq.output.usage.rewound_tokens == num_rewound  # no forbidden text was rolled back
        if not is_same or right.num_tokens >= len(drafts) or result.tokens[row] != drafts[right.num_tokens]:
            return False
        right.num_tokens += 1
        right.num_drawn += 1
        if seq.is_finished:
            return False
        self._scheduler.advance(seq)
        return True

    def _force_drafted(self, seq: Sequence, tokens: tuple[int, ...]) -> int:
        """Append forced tokens that were already computed. Returns how many forced tokens were appended before the
        output ended, or 0 if a policy changed the text."""
        num_before, num_rewound = len(seq.tokens), seq.output.usage.rewound_tokens
        self._steering.force(seq, 0, tokens)
        is_same = seq.output.usage.rewound_tokens == num_rewound
        num_forced = len(seq.tokens) - num_before if is_same else 0
        if not seq.is_finished:
            for _ in range(num_forced):
                self._scheduler.advance(seq)
        return num_forced


def num_guessed(item: Scheduled, ways: Vectors[Branch]) -> int:
    """Return how many draft tokens of a row are guesses rather than forced tokens. The branches `ways` decide whether a
    token is a guess. For later draft tokens, the lookahead decides whether they are guesses."""
    covered = 1 if ways else 0
    count = covered
    for way in ways:
        count += way.sample
        covered += 1 if way.sample else len(way.splices[0].ff_tokens)
    count -= max(covered - len(item.drafts), 0)  # the last branch applies after all draft tokens
    starts = accumulate(item.seq.drafts.sizes, initial=0)
    return count + sum(covered <= start < len(item.drafts) for start in list(starts)[:-1])


def _is_forced(way: Branch) -> bool:
    """Return whether the branch only appends tokens."""
    return not way.sample and len(way.splices) == 1 and not (way.splices[0].backtrack or way.splices[0].when_sampled)


def drafted_rows(draw: PlannedDraw) -> list[SampleRow]:
    """Return the rows that sample after each draft token of a `PlannedDraw`. The row of the `PlannedDraw` itself is not
    included."""
    item, rows = draw.item, list[SampleRow]()
    place = 1
    for way in draw.ways:
        if way.sample:
            index = item.last_logit + place
            rows.append(draw_row(draw.seq, way, item.seq.id, index, item.drafts, place, len(rows) + 1))
            place += 1
        else:
            place += len(way.splices[0].ff_tokens)
    return rows
