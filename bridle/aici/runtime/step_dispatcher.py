"""Runs one step of many sequences: sends ops to workers, and collects answers until a deadline. Sequences without an
answer at the deadline are late.

A late sequence loses only its own step. The sequence's answer is used in a later step. The deadline only
limits the wait for each sequence. A guest that uses too much processor time is ended by its worker. Only the main
thread runs this code.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from bridle.aici.runtime import messages as m
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.pool import WorkerPool
from bridle.aici.runtime.ring import PeerGone
from bridle.aici.runtime.sequences import RuntimeSequence, SequenceTable
from bridle.aici.runtime.worker_handle import WorkerHandle

_answers = m.decoder(m.Answers)
#: Seconds of waiting after which deaths that another thread noticed are checked.
_LOOK = 0.05

Op = m.Step2 | m.PostPre | m.Mid1


@dataclass(slots=True)
class Job:
    """The work of one sequence in a step. After the step, the job has an `answer`, or `is_late` is true, or the
    sequence has an `error`."""

    sequence: RuntimeSequence
    op: Op
    answer: m.SequenceAnswer | None = None
    is_late: bool = False
    is_counted: bool = False  # late, and already counted as late in this period


class Steps:
    """Runs the steps of the engine."""

    def __init__(self, pool: WorkerPool, table: SequenceTable, limits: RuntimeLimits) -> None:
        self._pool = pool
        self._table = table
        self._limits = limits
        self._number = 0

    def run(self, jobs: list[Job], deadline: float, limit: float, reply_by: float | None = None) -> None:
        """Collect the answers of the jobs that arrive before `deadline` (monotonic seconds).

        `reply_by` is an earlier end of the wait. If `reply_by` is set and the step has new jobs, the step waits only
        for the new jobs. With `reply_by`, a job counts as late once for each `limit` seconds since it was asked. A job
        ends with an error when its guest has used `limit` seconds of processor time for each permitted late step.
        """
        begin = time.monotonic()
        patience = self._limits.max_timeout_steps * limit
        shares: dict[WorkerHandle, list[Op]] = {}
        waiting: dict[int, Job] = {}
        fresh: set[int] = set()
        for job in jobs:
            sequence = job.sequence
            if sequence.error is not None:
                continue
            if sequence.ready is not None:
                job.answer, sequence.ready = sequence.ready, None
                continue
            waiting[sequence.key] = job
            if not sequence.is_outstanding:
                sequence.is_outstanding, sequence.last_op, sequence.asked_at = True, job.op, begin
                turns = job.op.turns if isinstance(job.op, m.Step2) else 1
                sequence.allowance = turns * min(patience, self._limits.max_call_time / 1000)
                shares.setdefault(sequence.worker, []).append(job.op)
                fresh.add(sequence.key)
        self._send(shares, patience)
        if reply_by is None:
            self._collect(waiting, deadline)
            self._judge(waiting)
        else:
            self._collect(waiting, min(reply_by, deadline), awaited=fresh)
            self._judge(waiting, limit)

    def catch_up(self, sequences: Iterable[RuntimeSequence], deadline: float) -> None:
        """Collect the answers of late sequences that are not in this step, until `deadline`."""
        waiting = {each.key: Job(each, each.last_op) for each in sequences if each.is_outstanding and each.last_op}
        self._collect(waiting, deadline)
        for job in waiting.values():
            job.sequence.ready = job.answer
        self.end_stuck({job.sequence.worker for job in waiting.values() if job.answer is None})

    def release(self, sequences: Iterable[RuntimeSequence], reason: str) -> None:
        """Drop these sequences, even if their callbacks still run."""
        keys: dict[WorkerHandle, list[int]] = {}
        for sequence in sequences:
            self._table.remove(sequence)
            keys.setdefault(sequence.worker, []).append(sequence.key)
        for worker, dropped in keys.items():
            if not worker.is_dead:
                worker.notify(m.Drop(dropped, reason))
            for key in dropped:
                self._pool.release(worker, key)

    # -- helpers -------------------------------------------------------------------------------------------

    def _send(self, shares: dict[WorkerHandle, list[Op]], patience: float) -> None:
        self._number += 1
        budget = float(self._limits.max_call_time)
        for worker, ops in shares.items():
            batch = m.WorkerBatch(self._number, ops, budget, 1000 * patience)
            try:
                if worker.is_dead:
                    raise PeerGone("worker is gone")
                worker.port.send(m.encode(batch))
                worker.note_asked()
            except PeerGone:
                self._pool.bury(worker)

    def _collect(self, waiting: dict[int, Job], deadline: float, awaited: set[int] | None = None) -> None:
        """Read answers until the jobs in `waiting` (or in a non-empty `awaited`) are answered, or time is up."""
        poll = select.poll()
        ports: dict[int, WorkerHandle] = {}
        for job in waiting.values():
            worker = job.sequence.worker
            descriptor = worker.port.bell.fileno()
            if descriptor >= 0:  # it died just now; its sequences get an error soon
                ports[descriptor] = worker
        for descriptor in ports:
            poll.register(descriptor, select.POLLIN)
        open_jobs = {key for key, job in waiting.items() if job.sequence.error is None}
        awaited = awaited or open_jobs
        while not awaited.isdisjoint(open_jobs):
            left = deadline - time.monotonic()
            ready = poll.poll(max(min(left, _LOOK) * 1000, 0))
            if not ready and left <= 0:
                return
            for descriptor, _ in ready:
                if not self._hear(ports[descriptor], waiting, open_jobs):
                    poll.unregister(descriptor)
            open_jobs = {key for key in open_jobs if waiting[key].sequence.error is None}

    def _hear(self, worker: WorkerHandle, waiting: dict[int, Job], open_jobs: set[int]) -> bool:
        """Process a worker's messages. Returns False if the worker is dead."""
        try:
            worker.note_heard()
            for message in worker.port.receive():
                for answer in _answers.decode(message).answers:
                    self._take(answer, waiting, open_jobs)
        except (PeerGone, msgspec.DecodeError, OSError, ValueError):
            self._pool.bury(worker)
            return False
        return True

    def _take(self, answer: m.SequenceAnswer, waiting: dict[int, Job], open_jobs: set[int]) -> None:
        sequence = self._table.by_key.get(answer.key)
        if sequence is None:
            return
        answer.masks = [memoryview(bytes(mask)) for mask in answer.masks]  # the ring will be overwritten
        for each in answer.ahead:
            each.masks = [memoryview(bytes(mask)) for mask in each.masks]
        sequence.is_outstanding = False
        job = waiting.get(answer.key)
        if job is None:
            sequence.ready = answer
            return
        job.answer = answer
        open_jobs.discard(answer.key)

    def _judge(self, waiting: dict[int, Job], stretch: float | None = None) -> None:
        """Count each late sequence: once in each step, or once for each `stretch` seconds."""
        now = time.monotonic()
        late = []
        for job in waiting.values():
            sequence = job.sequence
            if job.answer is not None:
                sequence.misses = 0
            elif sequence.error is None:
                misses = sequence.misses + 1 if stretch is None else int((now - sequence.asked_at) / stretch)
                is_told = sequence.misses < misses <= self._limits.max_timeout_steps
                job.is_late, job.is_counted = True, is_told
                sequence.misses = max(misses, sequence.misses)
                late.append(sequence.worker)
        if late:
            self.end_stuck(set(late))

    def end_stuck(self, workers: set[WorkerHandle] | None = None) -> None:
        """Kill stuck workers: those that do not end a guest after its time limit, or make no progress. If `workers` is
        None, all workers are checked."""
        allowances: dict[WorkerHandle, float] = {}
        for sequence in list(self._table.by_key.values()):
            worker = sequence.worker
            if sequence.is_outstanding and not worker.is_dead and (workers is None or worker in workers):
                allowances[worker] = allowances.get(worker, 0.0) + sequence.allowance
        silence, standstill = self._limits.max_silence / 1000, self._limits.max_standstill / 1000
        for worker, allowance in allowances.items():
            if worker.is_stuck(allowance + silence, standstill):
                self._pool.bury(worker)
