"""Overlapped steps: a step is planned and started before the tokens of the previous step are known.

With an `AsyncExecutor`, whose device computes while the engine does other work, a step has this order:

    draw(k)                       its masks are there
    plan(k+1), forward(k+1)       the tokens of k have names: the device has them
    take(k), commit(k), ask       text, stops, events and controllers, while forward(k+1) runs
    collect(k+1), branch(k+1)     what controllers answer, up to the end of forward(k+1) and a grace
    draw(k+1)

The overlap never changes an output. The work for a row is wasted if its sequence has ended, or continues with other
tokens than planned. The valid part of the row's KV is kept, and the rest is written again. Blocks that an ended
sequence releases are written only by later steps. The device runs steps in order. Blocks are hashed when their tokens
are known.

Some sequences wait until their previous tokens are known. After draft tokens or a splice, a step may give a sequence
several tokens. So several forced tokens in a row need no further step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from bridle.engine.control.controller_manager import ControllerManager
from bridle.engine.interfaces import AsyncExecutor
from bridle.engine.sampling.sample_planner import PlannedSamples, SamplePlanner, draws_next
from bridle.engine.scheduling.scheduler import Scheduled, Scheduler
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.verifier import AnyDraw, row_of
from bridle.errors import InternalError

#: Seconds between two checks for controllers' answers while the device computes.
_LOOK = 0.0005


@dataclass(slots=True)
class InFlightStep:
    """A step that is planned but whose tokens are not known yet. `planned`, `began`, `computed` and `steered` are
    engine clock times: before planning, before and after the launch, and before sampling. `rows` has the still valid
    rows of `scheduled`."""

    plan: StepPlan
    scheduled: list[Scheduled]
    planned: float
    branched: PlannedSamples
    began: float = 0.0
    computed: float = 0.0
    steered: float = 0.0
    rows: list[Scheduled] = field(default_factory=list)
    #: For each row: the number of tokens of its sequence, placeholders included, and the number of needed tokens.
    sizes: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepCallbacks:
    """Functions of the engine that are called at the end of a step. `conclude` counts a finished step and applies its
    tokens. `recover` continues after a failed step. `embed` returns the embeddings that a step computed. `wait` is
    called before the engine waits for the device."""

    conclude: Callable[[InFlightStep, StepResult, list[array[float]], float], None]
    recover: Callable[[list[Scheduled], PlannedSamples, Exception], None]
    embed: Callable[[int, PlannedSamples], list[array[float]]]
    wait: Callable[[], None]


class OverlapScheduler:
    """Runs overlapped steps. Overlaps steps. At most one step has been sampled whose tokens are not collected."""

    def __init__(
        self,
        executor: AsyncExecutor,
        scheduler: Scheduler,
        steering: ControllerManager,
        branching: SamplePlanner,
        ends: StepCallbacks,
        clock: Callable[[], float],
        step_timeout: float,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._steering = steering
        self._branching = branching
        self._ends = ends
        self._clock = clock
        self._step_timeout = step_timeout
        self._last: InFlightStep | None = None

    @property
    def is_under_way(self) -> bool:
        """Return whether a step is running whose tokens are not collected."""
        return self._last is not None

    # -- the end of a step, and the beginning of the next --------------------------------------------------

    def finish_previous_step(self) -> InFlightStep | None:
        """Collect and apply the tokens that are being sampled. If possible, the next step is launched first. Returns
        the launched step, which is not sampled yet, or None."""
        last, self._last = self._last, None
        if last is None:
            return None
        following = self._plan_after(last) if self._may_go_ahead(last) else None
        fault = None if following is None else self._launch(following)
        try:
            result = self._take(last.plan.step)
        except Exception as error:
            self._give_up(last, following, error)
            return None
        self._ends.conclude(last, result, [], self._clock())
        if following is None:
            return None
        if fault is not None:
            self._ends.recover(following.scheduled, following.branched, fault)
            return None
        self._confirm(following, last, result)
        return following

    def _give_up(self, last: InFlightStep, following: InFlightStep | None, error: Exception) -> None:
        """Discard the step that was sampled and the step after it. Both steps are computed again, with the same random
        numbers."""
        scheduled = {item.seq.id: item for item in ([] if following is None else following.scheduled)}
        scheduled |= {item.seq.id: item for item in last.scheduled}
        self._ends.recover(list(scheduled.values()), last.branched, error)

    def _may_go_ahead(self, last: InFlightStep) -> bool:
        """Return whether the next step can be planned without the tokens of the last step."""
        is_held = self._scheduler.is_searching or self._scheduler.is_paused
        if is_held or any(item.drafts for item in last.rows):
            return False
        draws = last.branched.draws
        return all(map(_gives_one_token, draws)) and not self._scheduler.speculation.may_draft(
            draw.seq for draw in draws
        )

    def _plan_after(self, last: InFlightStep) -> InFlightStep | None:
        """Plan the next step with placeholders for the tokens of the last step. A sequence that ends with the sampled
        token is left out."""
        planned = self._clock()
        named: list[Sequence] = []
        for draw in last.branched.draws:
            row = row_of(draw)
            if row is not None and len(draw.seq.tokens) + 1 < draw.seq.max_len:
                draw.seq.append_placeholder(row)
                named.append(draw.seq)
        try:
            plan, scheduled = self._scheduler.schedule(has_drafts=False)
            sizes = [(len(item.seq.tokens), item.seq.target) for item in scheduled]
        finally:
            for seq in named:
                seq.pop_placeholder()
        if not (plan.rows or plan.forks or plan.freed):
            return None
        return InFlightStep(plan, scheduled, planned, PlannedSamples(SampleBatch(plan.step)), sizes=sizes)

    def _confirm(self, flight: InFlightStep, last: InFlightStep, result: StepResult) -> None:
        """Record which placeholders have become tokens of their sequences in the executor."""
        rows = {draw.seq.id: row_of(draw) for draw in last.branched.draws}
        for item, (num_tokens, _) in zip(flight.scheduled, flight.sizes, strict=True):
            row = rows.get(item.seq.id)
            if row is not None and not item.seq.is_finished:
                item.seq.resolve_placeholder(num_tokens - 1, result.tokens[row])

    # -- the beginning of a step -------------------------------------------------------------------------

    def run(self, plan: StepPlan, scheduled: list[Scheduled], planned: float) -> None:
        """Launch a step whose tokens are all known, and start to sample it."""
        flight = InFlightStep(plan, scheduled, planned, PlannedSamples(SampleBatch(plan.step)))
        fault = self._launch(flight)
        if fault is None:
            self.draw(flight)
        else:
            self._ends.recover(scheduled, flight.branched, fault)

    def _launch(self, flight: InFlightStep) -> Exception | None:
        """Launch a step on the device. Returns the error if the step cannot be computed."""
        flight.began = self._clock()
        try:
            self._executor.forward(flight.plan)
        except Exception as error:
            return error
        flight.computed = self._clock()
        return None

    def draw(self, flight: InFlightStep) -> None:
        """Sample a launched step after the controllers of its sequences have answered. Results that cannot wait until
        the next call are collected at once."""
        try:
            self._settle(flight)
            if self._steering.sequences:
                self._await_answers(flight.rows)
            flight.steered = self._clock()
            flight.branched = branched = self._branching.branch(flight.plan.step, flight.rows)
            self._executor.sample_async(branched.batch)
            if branched.draws and not (branched.embeds or branched.batch.scores):
                self._last = flight
                return
            result = self._take(flight.plan.step)
            sampled = self._clock()
            vectors = self._ends.embed(flight.plan.step, branched) if branched.embeds else []
        except Exception as error:
            self._ends.recover(flight.scheduled, flight.branched, error)
            return
        self._ends.conclude(flight, result, vectors, sampled)

    def _settle(self, flight: InFlightStep) -> None:
        """Find the valid rows, and record that they were computed. For invalid rows, only the tokens that are still in
        the sequence count as computed."""
        sizes = flight.sizes or [(len(item.seq.tokens), item.seq.target) for item in flight.scheduled]
        flight.rows = [
            item
            for item, size in zip(flight.scheduled, sizes, strict=True)
            if not item.seq.is_finished and _is_as_planned(item, size)
        ]
        held = {item.seq.id for item in flight.rows}
        for item in flight.scheduled:
            if not item.seq.is_finished and item.seq.id not in held:
                item.seq.keep_computed(item.end)
        self._scheduler.commit(flight.rows)

    def _await_answers(self, rows: list[Scheduled]) -> None:
        """Wait for controllers while the device computes, and then for a grace period. So a controller's response time
        does not depend on when a step was launched, and its pool can measure it."""
        due = _unanswered([item.seq for item in rows if draws_next(item)])
        if due:
            self._steering.collect_answers()
            due = _unanswered(due)
        while due and not self._executor.await_forward(_LOOK):
            self._steering.collect_answers()
            due = _unanswered(due)
        if due:
            self._steering.collect_answers(due, self._clock() + self._step_timeout)

    def _take(self, step: int) -> StepResult:
        self._ends.wait()
        result = self._executor.get_result()
        if result.step != step:
            raise InternalError(f"the executor answered step {result.step} instead of {step}")
        return result


def _gives_one_token(draw: AnyDraw) -> bool:
    """Return whether sampling for a row will most likely give the row's sequence exactly one token."""
    is_one = isinstance(draw, Scheduled) or (
        draw.row is not None and not draw.ways and draw.look is None and draw.branch.control_vectors is None
    )
    return is_one and draw.seq.control.spliced_at != len(draw.seq.tokens)


def _is_as_planned(item: Scheduled, size: tuple[int, int]) -> bool:
    """Return whether an active sequence may continue and still has the tokens for which its row was planned."""
    seq, kv = item.seq, item.seq.kv
    is_same = size == (len(seq.tokens), seq.target) and kv.num_mirrored_tokens >= size[0]
    return is_same and kv.num_computed == item.row.start and not seq.is_held


def _unanswered(sequences: list[Sequence]) -> list[Sequence]:
    return [seq for seq in sequences if seq.is_controlled and seq.control.answer is None and not seq.is_finished]
