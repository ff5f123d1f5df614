"""Handles `mid_process` of dialect 2 in the supervisor, from the engine's message to the reply.

Ops are checked one by one. An error in one sequence appears only in its result and does not affect others.
"""

from __future__ import annotations

import time
from typing import Any

from msgspec import UNSET

from bridle.aici.masks import MaskLayout, MaskWriter
from bridle.aici.protocol import MidOp, MidProcess
from bridle.aici.replies import Branches, BranchReply, LookaheadReply, MidData2, SeqResult, SpliceReply, StorageCommand
from bridle.aici.runtime import messages as m
from bridle.aici.runtime.forks import Forks
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.lookahead import MAX_AHEAD
from bridle.aici.runtime.sequences import RuntimeSequence, SequenceTable
from bridle.aici.runtime.step_dispatcher import Job, Steps
from bridle.errors import BridleError, InvalidRequest

#: Maximum number of times that a guest may be asked in one step.
MAX_TURNS = 100
#: Maximum time that the engine may allow for a step, in milliseconds.
MAX_DEADLINE = 60_000.0


class Dialect2Handler:
    """Answers an engine that speaks dialect 2."""

    def __init__(
        self,
        table: SequenceTable,
        steps: Steps,
        forks: Forks,
        limits: RuntimeLimits,
        capabilities: frozenset[str],
        region: Any,
        dtype: str,
        vocab_size: int,
    ) -> None:
        self._table, self._steps, self._forks, self._limits = table, steps, forks, limits
        self._capabilities = capabilities
        self._masks = MaskWriter(region, MaskLayout.of(dtype, vocab_size, len(region)))

    def mid_process(self, request: MidProcess) -> MidData2:
        """Run a step. Returns the data of the reply."""
        begin = time.monotonic()
        self._masks.release()
        results: dict[int, SeqResult[Branches]] = {}
        jobs = self._jobs(request, results)
        patience = max(self._limits.max_step_time, min(request.deadline_ms or 0, MAX_DEADLINE))
        reply_by = None if request.reply_ms is None else begin + max(request.reply_ms, 0.0) / 1000
        self._steps.run(jobs, begin + patience / 1000, patience / 1000, reply_by)
        for job in jobs:
            seq_id = job.op.seq_id
            results[seq_id] = self._result(job, patience)
        for job in jobs:  # the rows of masks that are needed now come first
            self._add_ahead(job, results[job.op.seq_id])
        freed = request.freed if request.freed is not UNSET else []
        gone = [self._table.by_id[seq_id] for seq_id in dict.fromkeys(freed) if seq_id in self._table.by_id]
        self._steps.release(gone, "the sequence was freed")
        return self._reply(results)

    # -- from ops to jobs ----------------------------------------------------------------------------------

    def _jobs(self, request: MidProcess, results: dict[int, SeqResult[Branches]]) -> list[Job]:
        groups = _fork_groups(request.ops)
        listed = {op.id for op in request.ops}
        jobs = []
        for op in request.ops:
            try:
                jobs.append(self._job(op, groups.get(op.id, [op.id]), listed))
            except BridleError as error:
                results[op.id] = SeqResult(error=str(error))
        return jobs

    def _job(self, op: MidOp, group: list[int], listed: set[int]) -> Job:
        if op.backtrack is UNSET or op.tokens is UNSET:
            raise InvalidRequest(f"the op of sequence {op.id} lacks backtrack or tokens")
        step = m.Step2(0, op.id, op.backtrack, op.tokens, op.sampled, group, candidates=op.candidates)
        step.turns, step.ahead = min(max(op.turns, 1), MAX_TURNS), op.ahead[:MAX_AHEAD]
        step.changes, step.foreseen, step.probes = op.changes, op.foreseen, op.probes
        if step.foreseen > len(op.tokens) or (step.foreseen and op.backtrack):
            raise InvalidRequest(
                f"the op of sequence {op.id} marks {step.foreseen} tokens as foreseen, but has only {len(op.tokens)}"
            )
        if op.req_id is not None:
            if op.clone_id is not None:
                raise InvalidRequest(
                    f"the op of sequence {op.id} has both req_id and clone_id; it must have only one of them"
                )
            sequence = self._table.bind(op.req_id, op.id)
        elif op.clone_id is not None:
            sequence = self._clone(op, listed, step)
        else:
            sequence = self._known(op.id)
        if (sequence.is_outstanding or sequence.ready is not None) and (op.tokens or op.backtrack):
            raise InvalidRequest(
                f"sequence {op.id} has not answered its last op; its next op must have no tokens and no backtrack"
            )
        step.key = sequence.key
        sequence.untold += op.variables
        if not (sequence.is_outstanding or sequence.ready is not None):  # otherwise no op is sent
            step.variables, sequence.untold = sequence.untold, []
        return Job(sequence, step)

    def _known(self, seq_id: int) -> RuntimeSequence:
        sequence = self._table.by_id.get(seq_id)
        if sequence is None:
            raise InvalidRequest(f"unknown sequence {seq_id}")
        return sequence

    def _clone(self, op: MidOp, listed: set[int], step: m.Step2) -> RuntimeSequence:
        assert op.clone_id is not None
        if op.clone_id not in listed:
            raise InvalidRequest(f"sequence {op.id} is a clone of {op.clone_id}, which has no op in this step")
        if op.clone_idx is None or op.clone_idx < 1:
            raise InvalidRequest(f"the op of clone {op.id} has clone_idx {op.clone_idx}; must be at least 1")
        parent = self._known(op.clone_id)
        sequence, parent_key = self._forks.fork(parent, op.id, op.clone_idx)
        step.parent, step.branch = parent_key, op.clone_idx
        return sequence

    # -- from answers to results ---------------------------------------------------------------------------

    def _result(self, job: Job, patience: float) -> SeqResult[Branches]:
        sequence, answer = job.sequence, job.answer
        if sequence.error is not None and answer is None:
            return SeqResult(error=sequence.error, logs=self._last_logs(sequence))
        if job.is_late or answer is None:
            return self._late(job, patience)
        result: SeqResult[Branches] = SeqResult(
            error=answer.error,
            storage=[StorageCommand(write=write) for write in answer.storage],
            logs=answer.logs,
            micros=answer.micros,
        )
        if not answer.error and isinstance(answer.result, m.ChosenBranches):
            branches = answer.result.branches
            result.error = self._check(sequence, branches) or self._place(answer, branches, job.op.seq_id) or ""
            if not result.error:
                if answer.result.turns > 1 and len(branches) == 1:
                    branches[0].turns = answer.result.turns
                result.result = Branches(branches)
        elif not answer.error:
            result.error = "Worker: the answer belongs to the other dialect"
        if result.error and sequence.error is None:
            sequence.error = f"Previous WASM Error: {result.error}"
        return result

    def _last_logs(self, sequence: RuntimeSequence) -> str:
        """Return the log text for a sequence that ended: the reason if its worker died, otherwise nothing."""
        error = sequence.error or ""
        return f"{error}\n" if error.startswith("Worker:") else ""

    def _late(self, job: Job, patience: float) -> SeqResult[Branches]:
        limit = self._limits.max_timeout_steps
        text = f"\N{HOURGLASS WITH FLOWING SAND} late: {patience:g} ms, step {job.sequence.misses}/{limit}\n"
        text = text if job.is_counted else ""
        return SeqResult(result=Branches([BranchReply(splices=[SpliceReply()], wait=True)]), logs=text)

    def _check(self, sequence: RuntimeSequence, branches: list[BranchReply]) -> str | None:
        """Check branches against the engine's capabilities and the request's limits. Returns why the branches are not
        allowed, or None."""
        if len(branches) > 1:
            if "fork" not in self._capabilities:
                return f"{len(branches)} branches, but the engine cannot fork"
            problem = self._table.check_life(sequence.request, len(branches) - 1)
            if problem:  # forks beyond the limit are refused one by one when the engine makes them
                return problem
        for branch in branches:
            is_masked = branch.sample_mask is not None
            for splice in branch.splices:
                if "ff_tokens" not in self._capabilities and branch.wait is not True:
                    return "a splice, but the engine cannot fast-forward tokens"
                if splice.backtrack > is_masked and "backtrack" not in self._capabilities:
                    return f"backtrack of {splice.backtrack}, but the engine cannot backtrack"
        return None

    def _add_ahead(self, job: Job, result: SeqResult[Branches]) -> None:
        """Add the clones' answers to a guest's answer. Stops at an answer that the engine does not support, or when all
        mask rows are used."""
        if job.answer is None or result.result is None or not job.answer.ahead:
            return
        result.ahead = []
        for each in job.answer.ahead:
            is_refused = self._check(job.sequence, each.branches) or self._place(each, each.branches, job.op.seq_id)
            if is_refused:
                return
            writes = [StorageCommand(write=write) for write in each.storage]
            result.ahead.append(LookaheadReply(each.token, each.branches, each.logs, writes))

    def _place(
        self, answer: m.SequenceAnswer | m.LookaheadAnswer, branches: list[BranchReply], seq_id: int
    ) -> str | None:
        """Write the branches' masks to shared memory, and set each `sample_mask` to its row. Returns the error, or
        None."""
        rows: dict[int, int] = {}
        for branch in branches:
            index = branch.sample_mask
            if index is None:
                continue
            if index not in rows:
                if not self._masks.num_free:
                    return f"no row left for a mask; the region has {self._masks.layout.num_rows}"
                rows[index] = self._masks.write(answer.masks[index], seq_id)
            branch.sample_mask = rows[index]
        return None

    def _reply(self, results: dict[int, SeqResult[Branches]]) -> MidData2:
        layout = self._masks.layout
        return MidData2(
            seqs=results,
            dtype=layout.dtype,
            first_mask_byte_offset=layout.first_row,
            mask_num_bytes=layout.row_bytes,
            mask_num_elts=layout.row_elements,
            num_masks=max(self._masks.num_used, 1),
        )


def _fork_groups(ops: list[MidOp]) -> dict[int, list[int]]:
    """Return the sequences of each fork group of this step: the parent first, then the forks by branch."""
    clones: dict[int, list[tuple[int, int]]] = {}
    for op in ops:
        if op.clone_id is not None:
            clones.setdefault(op.clone_id, []).append((op.clone_idx or 0, op.id))
    groups: dict[int, list[int]] = {}
    for parent, members in clones.items():
        group = [parent, *(seq_id for _, seq_id in sorted(members))]
        for seq_id in group:
            groups[seq_id] = group
    return groups
