"""Plans the sampling rows of each branch, and applies the sampled tokens.

A sequence whose last token is computed has a logits row. The decision of the sequence's controller, if there is one,
says how the sequence continues. One branch either samples or splices. Several branches fork the sequence; the sampling
rows of all forks use the same logits row. `branch` runs before sampling and may create sequences. `commit` applies the
results, and `undo` removes the forks of a failed step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Vectors
from dataclasses import dataclass, field, replace
from functools import partial

from bridle.engine.control.controller_lookahead import PLAIN
from bridle.engine.control.controller_manager import ControllerManager
from bridle.engine.control.decision import Branch, Splice
from bridle.engine.interfaces import Ask
from bridle.engine.outputs.aligned import AlignedSampling
from bridle.engine.outputs.constraint_floor import apply_floor
from bridle.engine.outputs.output_holdback import find_alternative
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.sampling.choice_scoring import ChoiceScorer, Wanted, can_choose
from bridle.engine.sampling.lookahead import candidate_row, looks_ahead, options_with_forced
from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.engine.sampling.sample_rows import draw_row, draws_plainly
from bridle.engine.scheduling.scheduler import Scheduled, Scheduler
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, ScoreRun, StepResult
from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.verifier import (
    NONE_RIGHT,
    AcceptedDrafts,
    AnyDraw,
    DraftVerifier,
    PlannedDraw,
    drafted_rows,
    num_guessed,
)
from bridle.errors import BridleError, ControllerError, InvalidRequest
from bridle.outputs import Logprob
from bridle.sampling import SamplingParams

#: Accepted draft tokens, and how many of them were guessed.
_Accepted = tuple[AcceptedDrafts, int]


@dataclass(slots=True)
class Outputs:
    """The outputs of one request: the active ones by sequence id, and the number of outputs created so far."""

    sequences: dict[int, Sequence]
    num_created: int = 1


@dataclass(slots=True)
class PlannedSamples:
    """The sampling rows of one step, and the sequences that the step creates."""

    batch: SampleBatch
    draws: list[AnyDraw] = field(default_factory=list)
    looks_ahead: bool = False  # whether a candidate's forced tokens affect a draw
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)  # (parent, child)
    spread: list[Sequence] = field(default_factory=list)  # sequences that got forks for their request's n outputs
    choices: Wanted = field(default_factory=list)  # what the last scores of the batch are for
    choosing: list[Sequence] = field(default_factory=list)  # sequences that begin a choice
    embeds: list[tuple[Sequence, int]] = field(default_factory=list)  # with the logits row of the wanted vector


class SamplePlanner:
    """Turns decisions into sampling rows and forks, and turns results into sampled tokens."""

    def __init__(
        self,
        scheduler: Scheduler,
        steering: ControllerManager,
        progress: OutputProcessor,
        outputs: Mapping[str, Outputs],
        new_id: Callable[[], int],
        max_outputs: int,
        unnamed: PaddedVocab = NONE_UNNAMED,
        max_probes: int | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._steering = steering
        self._progress = progress
        self._outputs = outputs
        self._new_id = new_id
        self._max_outputs = max_outputs
        self._unnamed = unnamed
        self.choices = ChoiceScorer(scheduler, steering, progress, new_id, max_probes)
        self._drafted = DraftVerifier(scheduler, steering, progress, self._accept)

    # -- before sampling ---------------------------------------------------------------------------------

    def branch(self, step: int, scheduled: list[Scheduled]) -> PlannedSamples:
        """Create the sampling rows for all branches of the sequences that continue in this step."""
        out = PlannedSamples(SampleBatch(step, unnamed=self._unnamed))
        wanting = [item for item in scheduled if item.seq.asks_scores and item.seq.wants_scores]
        out.batch.scores = [run for item in wanting if not item.seq.is_probe and (run := score_run(item)) is not None]
        rows = out.batch.rows
        for item in scheduled:
            seq = item.seq
            if seq.is_probe:
                out.choices += self.choices.score(item, out.batch)
            if not draws_next(item):
                continue
            draws = seq.draws
            if (
                draws.is_plain
                and not (item.drafts or seq.output.bans)
                and (seq.control.pool is None or (seq.control.just_draws and not seq.probes))
            ):  # true for nearly all sequences, so this path has to be quick
                item.sample_row = len(rows)
                out.draws.append(item)
                rows.append(SampleRow(seq.id, item.last_logit, seq.sampling, seq.key, draws.num_draws))
            elif seq.request.embeds:
                out.embeds.append((seq, item.last_logit))
            else:
                self._branch_one(item, out)
        return out

    def _branch_one(self, item: Scheduled, out: PlannedSamples) -> None:
        seq = item.seq
        branches = PLAIN if seq.control.pool is None else self._steering.branches(seq)
        if len(branches) == 1 and self._is_simple(seq, branches[0], item):
            self._draw_one(seq, branches[0], item, out)
            return
        spreads = not seq.draws.was_forked and (len(branches) > 1 or any(branch.sample for branch in branches))
        num_own = len(branches)
        if spreads:  # a single forced splice needs no row; it is already applied
            branches *= seq.sampling.n
        if not branches or (len(branches) > 1 and not self._may_have(seq, len(branches))):
            return
        if spreads:
            seq.draws.was_forked = True
            out.spread.append(seq)
        seq.draws.is_plain = draws_plainly(seq)
        owners = [seq]
        if len(branches) > 1:
            owners += [self._fork(seq, number, num_own, out) for number in range(1, len(branches))]
            seq.draws.num_forks += 1
        options = None if seq.control.answer is None else seq.control.answer.options
        if options is not None and can_choose(seq, options):
            out.choosing.append(seq)
            out.choices += self.choices.begin(item, owners, options, out.batch)
            return
        look = None
        if seq.sampling.lookahead > 0 and looks_ahead(branches):
            look, out.looks_ahead = len(out.batch.rows), True
            out.batch.rows.append(candidate_row(draw_row(seq, branches[0], seq.id, item.last_logit)))
        for branch, owner in zip(branches, owners, strict=True):
            draw = PlannedDraw(owner, branch, None, item, look=look)
            if branch.sample:
                draw.row = len(out.batch.rows)
                out.batch.rows.append(draw_row(owner, branch, item.seq.id, item.last_logit, item.drafts))
                if item.drafts and len(branches) == 1 and _is_draftable(branch) and not item.seq.probes:
                    draw.ways = self._drafted.ways(item)
                    out.batch.rows += drafted_rows(draw)
            out.draws.append(draw)

    def _draw_one(self, seq: Sequence, branch: Branch, item: Scheduled, out: PlannedSamples) -> None:
        """Plan the only sampled token of a sequence with a controller."""
        rows = out.batch.rows
        if not seq.draws.is_plain or seq.output.bans or branch.sampling is not None or branch.top_logprobs:
            out.draws.append(PlannedDraw(seq, branch, len(rows), item))
            rows.append(draw_row(seq, branch, seq.id, item.last_logit))
            return
        changes = branch.splices or branch.control_vectors is not None or seq.probes
        out.draws.append(PlannedDraw(seq, branch, len(rows), item, (), None, -1 if changes else len(rows)))
        mask, bias, number = branch.mask, branch.bias, seq.draws.num_draws
        rows.append(SampleRow(seq.id, item.last_logit, seq.sampling, seq.key, number, mask, bias))

    def _is_simple(self, seq: Sequence, branch: Branch, item: Scheduled) -> bool:
        """Return whether a sequence with a controller samples from one row, as in nearly all steps except its first
        one."""
        answer = seq.control.answer
        has_more = item.drafts or seq.sampling.lookahead or answer is None or answer.options is not None
        return branch.sample and seq.draws.was_forked and not has_more

    def _may_have(self, seq: Sequence, num_branches: int) -> bool:
        """Return whether the request may have `num_branches - 1` more outputs. If the request may not have more
        outputs, the sequence fails."""
        total = self._outputs[seq.request.id].num_created + num_branches - 1
        limit = max(self._max_outputs, seq.sampling.n)
        if total > limit:
            self._progress.fail(seq, ControllerError(f"the fork makes {total} outputs; at most {limit}"))
            return False
        return True

    def _fork(self, seq: Sequence, number: int, num_own: int, out: PlannedSamples) -> Sequence:
        """Fork `seq` for branch `number`, counted over the outputs of `seq`, which have `num_own` branches each."""
        outputs = self._outputs[seq.request.id]
        child = seq.fork(self._new_id(), outputs.num_created, number % num_own, number // num_own)
        child.draws.is_plain = seq.draws.is_plain
        outputs.num_created += 1
        outputs.sequences[child.id] = child
        self._scheduler.add_fork(seq, child)
        if child.is_controlled:
            self._steering.add(child, Ask(child.id, parent=seq.id, branch=number, index=child.index))
        out.forks.append((seq, child))
        return child

    def undo(self, out: PlannedSamples) -> None:
        """Remove the forks of a step that failed before it gave any result."""
        for seq in out.choosing:
            self.choices.undo(seq)
        for _, child in reversed(out.forks):
            outputs = self._outputs[child.request.id]
            del outputs.sequences[child.id]
            outputs.num_created -= 1
            self._steering.forget(child)
            self._scheduler.remove(child)
        for parent in {id(parent): parent for parent, _ in out.forks}.values():
            parent.draws.num_forks -= 1
        for seq in out.spread:
            seq.draws.was_forked = seq.draws.is_plain = False

    # -- after sampling ----------------------------------------------------------------------------------

    def commit(
        self, scheduled: list[Scheduled], out: PlannedSamples, result: StepResult, vectors: Vectors[array[float]] = ()
    ) -> None:
        """Apply the results of a step: scores first, then new outputs, then tokens. `vectors` are the embeddings for
        the sequences in `out.embeds`."""
        num_known = len(result.scores) - len(out.choices)
        changed = set[int]()  # sequences that continue with other tokens than the sampled one
        runs = zip(out.batch.scores[:num_known], result.scores[:num_known], strict=True)
        self._note_scores(scheduled, {run.seq_id: values for run, values in runs}, changed)
        for (seq, _), vector in zip(out.embeds, vectors, strict=True):
            self._progress.embed(seq, vector)
        for parent, child in out.forks:
            self._progress.announce_fork(parent, child)
        if out.looks_ahead:
            changed |= self._look_ahead(out, result, changed)
        accepted = self._take_draws(out, result, changed)
        if any(item.drafts for item in scheduled):
            self._count_drafts(scheduled, accepted)
        if out.choices:
            self.choices.take(out.choices, result.scores[num_known:], scheduled)

    def _note_scores(self, scheduled: list[Scheduled], scores: Mapping[int, list[Logprob]], changed: set[int]) -> None:
        """Record computed prompts and the log-probabilities of known tokens. Outputs that waited only for
        log-probabilities of known tokens end. Outputs that can no longer be among the best end too."""
        for item in scheduled:
            seq = item.seq
            if (seq.output.prompt_sent and seq.output.unlikely is None and not scores) or seq.is_finished:
                continue
            if not seq.output.prompt_sent and item.end >= seq.num_prompt:
                self._progress.note_prompt(seq)
            if seq.id in scores:
                self._progress.add_scores(seq, scores[seq.id])
                self._apply_floor(seq, changed)
                self._restart(seq, changed)
                self._progress.finish_when_scored(seq)
            elif seq.output.unlikely is not None:
                self._apply_floor(seq, changed)

    def _take_draws(self, out: PlannedSamples, result: StepResult, changed: set[int]) -> dict[int, _Accepted]:
        """Apply the sampled tokens. Returns the accepted draft tokens by sequence id."""
        accepted: dict[int, _Accepted] = {}
        for draw in out.draws:
            seq, row = draw.seq, draw.sample_row
            if changed and seq.id in changed:
                continue
            if row >= 0 and (token := result.tokens[row]) >= 0:
                seq.draws.num_draws += 1
                is_kept = self._progress.append_plain(seq, token, result.logprobs[row])
                if seq.control.pool is not None:
                    self._steering.report(seq, token if is_kept else None)
                continue
            if isinstance(draw, Scheduled):
                draw = PlannedDraw(seq, PLAIN[0], row, draw)
            if draw.row is None:
                splice, scales = draw.branch.splices[0], draw.branch.control_vectors
                self._steering.force(draw.seq, splice.backtrack, splice.ff_tokens, scales=scales)
            else:
                self._take_draw(draw, draw.row, out, result, changed, accepted)
        return accepted

    def _take_draw(
        self,
        draw: PlannedDraw,
        row: int,
        out: PlannedSamples,
        result: StepResult,
        changed: set[int],
        accepted: dict[int, _Accepted],
    ) -> None:
        """Apply a sampled token that is traced, follows draft tokens, or is subject to rules."""
        seq = draw.seq
        if seq.is_traced:
            self._progress.note_drawn(seq, out.batch.rows[row], result, row, is_draft=False)
        if seq.output.aligned is not None and not self._is_kept(seq.output.aligned, result, row):
            seq.draws.num_draws += 1
            self._restart(seq, changed)
        elif draw.ways:
            right = self._drafted.accept(draw, row, out.batch, result)
            accepted[seq.id] = right, num_guessed(draw.item, draw.ways)
        else:
            mu = result.mus[row] if result.mus else None
            probes = result.probes[row] if result.probes else ()
            self._accept(draw, result.tokens[row], result.logprobs[row], mu, probes)

    def _count_drafts(self, scheduled: list[Scheduled], accepted: Mapping[int, _Accepted]) -> None:
        for item in scheduled:
            if item.drafts:
                right, num_drafted = accepted.get(item.seq.id) or (NONE_RIGHT, num_guessed(item, []))
                self._progress.count_drafts(item.seq, num_drafted, right.num_drawn)
                self._scheduler.commit_drafts(item, right.num_tokens, num_drafted, right.num_drawn)

    def _is_kept(self, aligned: AlignedSampling, result: StepResult, row: int) -> bool:
        """Return whether an output with aligned sampling keeps its sampled token."""
        odds, token = result.draws[row] if result.draws else None, result.tokens[row]
        return odds is None or token < 0 or aligned.advance(token, math.exp(odds.before.logprob), 1.0 - odds.taken)

    def _restart(self, seq: Sequence, changed: set[int]) -> None:
        """Restart an output if its aligned sampling requires a restart."""
        if seq.is_finished or seq.output.aligned is None or not seq.output.aligned.must_restart:
            return
        changed.add(seq.id)
        self._progress.restart(seq)
        seq.clamp_computed()
        self._steering.report(seq)

    def _look_ahead(self, out: PlannedSamples, result: StepResult, changed: set[int]) -> set[int]:
        """Begin choices for sampled tokens that have candidates with forced tokens after them. Returns the ids of the
        sequences that wait for a choice."""
        by_row: dict[int, list[PlannedDraw]] = {}
        for draw in out.draws:
            if isinstance(draw, PlannedDraw) and draw.look is not None and draw.seq.id not in changed:
                by_row.setdefault(draw.look, []).append(draw)
        waiting = set[int]()
        for look, draws in by_row.items():
            parent = draws[0].item.seq
            if not (options := options_with_forced(parent, result.logprobs[look])):
                continue
            by_seq = {draw.seq.id: draw for draw in draws}
            waiting |= by_seq.keys()
            for draw in draws:
                if draw.row is not None and draw.seq.is_traced:
                    self._progress.note_removed(draw.seq, out.batch.rows[draw.row], result, draw.row)
            owners = [draw.seq for draw in draws]
            self.choices.begin_scored(
                parent, owners, options, draws[0].branch.sampling, partial(self._accept_candidate, by_seq)
            )
        return waiting

    def _accept_candidate(self, draws: Mapping[int, PlannedDraw], seq: Sequence, tokens: tuple[int, ...]) -> None:
        """Apply a token that was chosen together with the tokens that are forced after it. If the log-probability of
        the token is requested, it is computed later."""
        self._accept(draws[seq.id], tokens[0], None)
        if not seq.is_finished:
            seq.clamp_computed()

    def _apply_floor(self, seq: Sequence, changed: set[int]) -> None:
        """Act on a run of forced tokens that is less likely than the request allows. Sequences that continue with other
        tokens than the sampled ones are added to `changed`. If a controller is late, the engine first waits for its
        answer, because the controller still computes with the old tokens."""
        if seq.output.unlikely is None or seq.control.awaits_answer or not apply_floor(seq, self._progress):
            return
        changed.add(seq.id)
        self.choices.end(seq)
        if not seq.is_finished:
            self._steering.report(seq)

    def _accept(
        self,
        draw: PlannedDraw,
        token: int,
        logprob: Logprob | None,
        mu: float | None = None,
        probes: tuple[float, ...] = (),
    ) -> None:
        """Apply a sampled token to its branch: the token enters the sequence, or a splice replaces it."""
        seq = draw.seq
        if token < 0:
            if not find_alternative(seq):
                self._steering.mark_answered_ahead(seq)
                self._progress.fail(seq, _nothing_left(seq))
            elif seq.output.num_banned:
                self._progress.put_right(seq)
                self._steering.report(seq)
            return
        seq.draws.num_draws += 1
        candidates = None
        if draw.branch.top_logprobs and logprob is not None:
            candidates, logprob = logprob.top[: draw.branch.top_logprobs], _as_asked(seq.sampling, logprob)
        splice = _matching(draw.branch.splices, token) if draw.branch.splices else None
        if splice is not None and splice.backtrack:
            self._progress.count_replaced(seq)
            if seq.trace is not None:
                self._progress.tracer.replaced(seq, token)
            scales = draw.branch.control_vectors
            self._steering.force(seq, splice.backtrack - 1, splice.ff_tokens, token, candidates, scales, probes)
            return
        if mu is not None and draw_has_mirostat(seq, draw.branch):
            seq.draws.mus.append((len(seq.tokens) + 1, mu))
        if draw.branch.control_vectors is not None:
            seq.scale_vectors(draw.branch.control_vectors)
        self._progress.append(seq, token, logprob, forced=False)
        is_kept = not seq.output.num_banned or self._progress.put_right(seq)
        if seq.control.pool is None:
            return
        if splice is not None and is_kept and not seq.is_over:
            is_kept = self._progress.force(seq, splice.ff_tokens)
        self._steering.report(seq, *((token, candidates, probes) if is_kept else ()))


def draws_next(item: Scheduled) -> bool:
    """Return whether this step samples a token of the sequence: all its tokens are computed, and its output
    continues."""
    seq = item.seq
    return item.end == len(seq.tokens) and seq.output.ending is None and not seq.is_finished


def score_run(item: Scheduled) -> ScoreRun | None:
    """Return the known tokens whose log-probabilities are read from this logits row, or None."""
    seq = item.seq
    first = max(seq.output.num_scored, item.row.start + 1)
    last = min(item.end + 1, seq.num_to_score)
    if first >= last:
        return None
    logits_start = item.last_logit + first - item.end  # position `first - 1` predicts the first known token
    num_top = max(seq.sampling.prompt_logprobs or 0, seq.sampling.logprobs or 0)
    return ScoreRun(seq.id, logits_start, tuple(seq.tokens[first:last]), num_top)


def draw_has_mirostat(seq: Sequence, branch: Branch) -> bool:
    """Return whether a branch was sampled with Mirostat."""
    return (branch.sampling or seq.sampling).has_mirostat


def _as_asked(sampling: SamplingParams, logprob: Logprob) -> Logprob | None:
    """Return `logprob` with only those alternatives that the client requested."""
    return None if sampling.logprobs is None else replace(logprob, top=logprob.top[: sampling.logprobs])


def _matching(splices: tuple[Splice, ...], token: int) -> Splice | None:
    return next((s for s in splices if not s.when_sampled or token in s.when_sampled), None)


def _nothing_left(seq: Sequence) -> BridleError:
    if seq.output.bans.get(len(seq.tokens)) and not seq.sampling.banned_phrases:
        return ControllerError("every way to go on leads to what a policy forbids")
    if seq.output.bans.get(len(seq.tokens)):
        return InvalidRequest("every way to go on leads to one of the banned_phrases", "banned_phrases")
    message = "no token can be drawn: mask and bias forbid all, or the model's logits are not numbers"
    return ControllerError(message) if seq.is_controlled else InvalidRequest(message, "logit_bias")


def _is_draftable(branch: Branch) -> bool:
    """Return whether draft tokens that were computed after this branch can still be accepted."""
    return not branch.splices and branch.control_vectors is None
