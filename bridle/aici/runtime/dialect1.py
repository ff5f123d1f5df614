"""Handles `post_pre_process` and `mid_process` of dialect 1 in the supervisor, from the engine's message to the reply.

A late controller loses only one step, as in dialect 2. The sequence of a late controller is suspended (pre phase), or
gets a splice that only removes the sampled token (mid phase).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bridle.aici import replies as r
from bridle.aici.masks import dense_table, fill_row
from bridle.aici.protocol import MidProcess, PostPreProcess
from bridle.aici.runtime import messages as m
from bridle.aici.runtime.forks import Forks
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.sequences import RuntimeSequence, SequenceTable
from bridle.aici.runtime.step_dispatcher import Job, Steps
from bridle.errors import InvalidRequest, ProtocolError

#: Milliseconds that the original runtime waits further when a phase is not done in time.
GRACE = 200.0


class Dialect1Handler:
    """Answers an engine that speaks dialect 1."""

    def __init__(
        self, table: SequenceTable, steps: Steps, forks: Forks, limits: RuntimeLimits, region: Any, vocab_size: int
    ) -> None:
        self._table, self._steps, self._forks, self._limits = table, steps, forks, limits
        self._region = memoryview(region)
        self._vocab_size = vocab_size
        self._values = dense_table()

    # -- post and pre --------------------------------------------------------------------------------------

    def post_pre_process(self, request: PostPreProcess) -> r.PostPreData:
        """Run the post callback of the scheduled sequences, and the pre callback of every live sequence. An invalid id
        fails the whole request, before any callback runs."""
        begin = time.monotonic()
        self._check(request)
        for pre in request.pre_ops:
            self._table.bind(pre.req_id, pre.id)
        posts = {op.id: op for op in request.post_ops}
        data = r.PostPreData({}, {})
        in_mid = [sequence for sequence in self._table.by_id.values() if _is_in_mid(sequence)]
        has_time = len(in_mid) == len(self._table.by_id)
        self._steps.catch_up(in_mid, begin + (self._step_limit() if has_time else 0.0))
        jobs: list[Job] = []
        for seq_id, sequence in list(self._table.by_id.items()):
            post = posts.get(seq_id)
            if _is_in_mid(sequence):
                self._still_in_mid(sequence, seq_id, data, post is not None)
                continue
            tokens = post.tokens if post else None
            jobs.append(Job(sequence, m.PostPre(sequence.key, seq_id, tokens, post.backtrack if post else 0)))
        patience, limit = self._limits.max_pre_step_time + GRACE, self._step_limit()
        self._steps.run(jobs, begin + patience / 1000, limit)
        for job in jobs:
            self._phases(job, data, job.op.seq_id in posts)
        gone = [self._table.by_id[i] for i in dict.fromkeys(request.freed) if i in self._table.by_id]
        self._steps.release(gone, "the sequence was freed")
        return data

    def _check(self, request: PostPreProcess) -> None:
        for op in request.post_ops:
            if op.id not in self._table.by_id:
                raise InvalidRequest(f"post_ops: unknown sequence {op.id}")
        used = set(self._table.by_id)
        names: set[str] = set()
        for pre in request.pre_ops:
            if pre.id in used:
                raise InvalidRequest(f"pre_ops: sequence {pre.id} exists already")
            if pre.req_id not in self._table.pending or pre.req_id in names:
                raise InvalidRequest(f"pre_ops: unknown req_id {pre.req_id[:80]!r}")
            used.add(pre.id)
            names.add(pre.req_id)

    def _still_in_mid(self, sequence: RuntimeSequence, seq_id: int, data: r.PostPreData, has_post: bool) -> None:
        """Add results for a sequence whose mid callback is late: it is suspended until that callback has ended."""
        if has_post:
            data.post_seqs[seq_id] = r.SeqResult(result=r.PostResult(False))
        is_done = sequence.ready is not None
        data.pre_seqs[seq_id] = r.SeqResult(result=r.PreResult(suspend=not is_done))

    def _phases(self, job: Job, data: r.PostPreData, has_post: bool) -> None:
        sequence, seq_id, answer = job.sequence, job.op.seq_id, job.answer
        if answer is not None and not answer.error and isinstance(answer.result, m.PhaseResults):
            phases = answer.result
            if has_post:
                data.post_seqs[seq_id] = r.SeqResult(
                    result=r.PostResult(bool(phases.stop)),
                    storage=_commands(phases.post_storage),
                    logs=phases.post_logs,
                    micros=phases.post_micros,
                )
            data.pre_seqs[seq_id] = r.SeqResult(
                result=phases.pre,
                storage=_commands(answer.storage),
                logs=answer.logs,
                micros=max(answer.micros - phases.post_micros, 0),
            )
            return
        if job.is_late:
            if has_post:
                data.post_seqs[seq_id] = r.SeqResult(result=r.PostResult(False))
            logs = self._late_line(sequence, self._limits.max_pre_step_time)
            data.pre_seqs[seq_id] = r.SeqResult(result=r.PreResult(suspend=True), logs=logs)
            return
        self._failed(job, data, has_post)

    def _failed(self, job: Job, data: r.PostPreData, has_post: bool) -> None:
        sequence, seq_id = job.sequence, job.op.seq_id
        error, logs, storage = self._end(job)
        in_post = job.answer is not None and job.answer.failed_in_post
        if has_post:
            told = error if in_post or error.startswith("Worker:") else ""
            data.post_seqs[seq_id] = r.SeqResult(
                error=told,
                result=None if error.startswith("Worker:") else r.PostResult(in_post),
                logs=logs if in_post else "",
                storage=storage if in_post else [],
            )
        data.pre_seqs[seq_id] = r.SeqResult(
            error=(sequence.error or error) if in_post else error,
            result=None if error.startswith("Worker:") else r.PreResult(),
            logs="" if in_post else logs,
            storage=[] if in_post else storage,
        )

    # -- mid -----------------------------------------------------------------------------------------------

    def mid_process(self, request: MidProcess) -> r.MidData1:
        """Run the scheduled sequences; row i of the bias matrix belongs to op i."""
        begin = time.monotonic()
        size = len(request.ops) * self._vocab_size * 4
        if size >= len(self._region):
            raise ProtocolError(f"the shared memory of masks is too small: {len(request.ops)} rows need {size} bytes")
        self._region[:size] = bytes(size)
        results: dict[int, r.SeqResult[r.MidResult]] = {}
        jobs: list[tuple[int, Job]] = []
        for row, (job, reason) in enumerate(self._jobs(request)):
            if job is None:
                results[request.ops[row].id] = r.SeqResult(error=reason)
            else:
                jobs.append((row, job))
        self._steps.run([job for _, job in jobs], begin + self._patience() / 1000, self._step_limit())
        for row, job in jobs:
            results[job.op.seq_id] = self._sampled(row, job)
        return r.MidData1(results, len(request.ops))

    def _step_limit(self) -> float:
        """Return the time limit for all callbacks of a step, in seconds. The limit includes the pre phase, in which
        guests of dialect 2 decide."""
        return max(self._limits.max_step_time, self._limits.max_pre_step_time) / 1000

    def _patience(self) -> float:
        limit = self._limits.max_step_time
        return limit + (GRACE if limit < GRACE else 0)

    def _jobs(self, request: MidProcess) -> list[tuple[Job | None, str]]:
        """Return a job for each op, or the reason why the op has no job. An invalid id fails the whole request before
        any callback runs."""
        listed = {op.id for op in request.ops if op.clone_id is None}
        groups: dict[int, list[int]] = {}
        for op in request.ops:
            parent = op.id if op.clone_id is None else op.clone_id
            if parent not in listed or parent not in self._table.by_id:
                raise InvalidRequest(
                    f"mid_process: sequence {op.id} is a clone of sequence {parent}, which is unknown or not in this "
                    "request"
                )
            if op.clone_id is not None and op.id in self._table.by_id:
                raise InvalidRequest(f"mid_process: sequence {op.id} exists already")
            group = groups.setdefault(parent, [parent])
            if op.clone_id is not None:
                group.append(op.id)
        jobs: list[tuple[Job | None, str]] = []
        for op in request.ops:
            group = groups[op.id if op.clone_id is None else op.clone_id]
            step = m.Mid1(0, op.id, group)
            if op.clone_id is None:
                sequence = self._table.by_id[op.id]
            else:
                branch = group.index(op.id)
                try:
                    sequence, step.parent = self._forks.fork(self._table.by_id[op.clone_id], op.id, branch)
                except InvalidRequest as error:
                    jobs.append((None, str(error)))
                    continue
                step.branch = branch
            step.key = sequence.key
            jobs.append((Job(sequence, step), ""))
        return jobs

    def _sampled(self, row: int, job: Job) -> r.SeqResult[r.MidResult]:
        answer = job.answer
        if answer is not None and not answer.error and isinstance(answer.result, m.Sampled):
            self._write(row, answer.masks[0])
            return r.SeqResult(
                result=answer.result.splice, storage=_commands(answer.storage), logs=answer.logs, micros=answer.micros
            )
        if job.is_late:
            logs = self._late_line(job.sequence, self._limits.max_step_time)
            return r.SeqResult(result=r.MidResult([], 1), logs=logs)
        if answer is not None and not answer.error:  # the engine scheduled a sequence that pre had suspended
            job.sequence.ready = answer
            return r.SeqResult(result=r.MidResult([], 1))
        error, logs, storage = self._end(job)
        return r.SeqResult(error=error, logs=logs, storage=storage)

    def _write(self, row: int, mask: memoryview) -> None:
        stride = 4 * self._vocab_size
        packed = np.frombuffer(mask, np.uint8, count=(self._vocab_size + 7) // 8)
        fill_row(self._region[row * stride : (row + 1) * stride], packed, self._vocab_size, self._values)

    # -- endings -------------------------------------------------------------------------------------------

    def _end(self, job: Job) -> tuple[str, str, list[r.StorageCommand]]:
        """Return error, logs and writes of a sequence that has ended."""
        sequence, answer = job.sequence, job.answer
        if answer is None:
            error = sequence.error or "Worker: no answer"
            return error, error if error.startswith("Worker:") else "", []
        error = answer.error or "Worker: the answer belongs to the other dialect"
        sequence.error = sequence.error or f"Previous WASM Error: {error}"
        return error, answer.logs, _commands(answer.storage)

    def _late_line(self, sequence: RuntimeSequence, patience: float) -> str:
        limit = self._limits.max_timeout_steps
        return f"\N{HOURGLASS WITH FLOWING SAND} late: {patience:g} ms, step {sequence.misses}/{limit}\n"


def _is_in_mid(sequence: RuntimeSequence) -> bool:
    """Return whether the sequence's pending or late answer belongs to a mid callback."""
    waits = sequence.is_outstanding or sequence.ready is not None
    return waits and sequence.error is None and isinstance(sequence.last_op, m.Mid1)


def _commands(writes: list[r.WriteVar]) -> list[r.StorageCommand]:
    return [r.StorageCommand(write=write) for write in writes]
