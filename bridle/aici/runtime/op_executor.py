"""Runs operations in a worker: the callbacks of one sequence for one step."""

from __future__ import annotations

import time
from collections import deque

from bridle.aici.replies import PreResult, WriteVar
from bridle.aici.runtime import messages as m
from bridle.aici.runtime.guest_sequence import GuestSequence
from bridle.aici.runtime.lookahead import Lookahead
from bridle.aici.runtime.wasm import GuestStopped
from bridle.errors import ControllerError

Op = m.Step2 | m.PostPre | m.Mid1


class SequenceSlot:
    """A sequence in its worker. The worker's mutex guards `is_running` and `is_dropped`."""

    __slots__ = ("ahead", "hosted", "is_dropped", "is_running", "request")

    def __init__(self, hosted: GuestSequence, request: int) -> None:
        self.hosted = hosted
        self.ahead = Lookahead()
        self.request = request
        self.is_running = False
        self.is_dropped = False

    def take_foreseen(self, op: Op, budget_ms: float) -> None:
        """Replace the guest by the clone that has seen the op's draft tokens, and drop the other clones."""
        if isinstance(op, m.Step2) and op.foreseen:
            known, op.tokens = op.tokens[: op.foreseen], op.tokens[op.foreseen :]
            self.hosted = self.ahead.accept(self.hosted, known, budget_ms)
            if self.is_dropped:  # only the replaced instance was cancelled
                self.hosted.instance.cancel(GuestStopped("the sequence was freed"))
        self.ahead.forget()

    def close(self) -> None:
        """Free all memory. No callback may be running."""
        self.hosted.instance.close()
        self.ahead.close()


class OperationBatch:
    """A batch in progress: the answers that are ready, and whether they were already sent."""

    def __init__(self, batch: m.WorkerBatch) -> None:
        self.number = batch.number
        self.budget_ms, self.patience_ms = batch.budget_ms, batch.patience_ms
        self.queue = deque(batch.ops)
        self.answers: list[m.SequenceAnswer] = []
        self.num_bytes = 0
        self.is_flushed = False


def start(hosted: GuestSequence, message: m.Create, budget_ms: float) -> tuple[list[int], PreResult | None]:
    """Run the callbacks with which a guest starts. Returns the prompt, and in dialect 1b the pre callback's result."""
    prompt = hosted.start(message.prompt, budget_ms)
    return prompt, hosted.first_pre(budget_ms) if message.first_pre else None


def run_op(seat: SequenceSlot, op: Op, budget_ms: float, patience_ms: float) -> m.SequenceAnswer:
    """Run the callbacks of one op. Returns the answer, in which the run time is still missing."""
    answer = m.SequenceAnswer(op.key, "", "", [], 0, None, [])
    seat.hosted.instance.be_patient(patience_ms)
    try:
        seat.take_foreseen(op, budget_ms)
        _call(seat.hosted, op, budget_ms, patience_ms, answer)
    except ControllerError as error:
        answer.error = str(error)
    except Exception as error:  # a bug of bridle, which must not end other guests
        answer.error = f"internal error of the runtime: {error!r}"
    instance = seat.hosted.instance
    answer.logs += instance.log.drain()
    answer.storage += instance.writes
    instance.writes = []
    return answer


def _call(hosted: GuestSequence, op: Op, budget_ms: float, patience_ms: float, answer: m.SequenceAnswer) -> None:
    hosted.instance.seq_id = op.seq_id
    if isinstance(op, m.Step2):
        for name, value in op.variables:
            hosted.instance.variables.execute(WriteVar(name, value, "Set"))
        hosted.probes = op.probes
        choice = hosted.step(op.backtrack, op.tokens, op.sampled, op.group, op.candidates, budget_ms, op.changes)
        choice, turns = hosted.keep_asking(choice, op.turns, budget_ms, patience_ms)
        answer.result = m.ChosenBranches(choice.branches, turns)
        answer.masks = [memoryview(mask) for mask in choice.masks]
    elif isinstance(op, m.PostPre):
        _run_phases(hosted, op, budget_ms, answer)
    else:
        splice, mask = hosted.mid(op.group, budget_ms)
        answer.result, answer.masks = m.Sampled(splice), [memoryview(mask)]


def _run_phases(hosted: GuestSequence, op: m.PostPre, budget_ms: float, answer: m.SequenceAnswer) -> None:
    phases = m.PhaseResults(None, PreResult())
    if op.tokens is not None:
        begin = time.perf_counter_ns()
        answer.failed_in_post = True
        phases.stop = hosted.post(op.tokens, op.backtrack, budget_ms)
        answer.failed_in_post = False
        phases.post_micros = (time.perf_counter_ns() - begin) // 10_000 * 10
        phases.post_logs = hosted.instance.log.drain()
        phases.post_storage, hosted.instance.writes = hosted.instance.writes, []
    phases.pre = hosted.pre(budget_ms)
    answer.result = phases


def failed(key: int, error: str) -> m.SequenceAnswer:
    """Return an answer that has only this error."""
    return m.SequenceAnswer(key, error, "", [], 0, None, [])
