"""Forks sequences for the supervisor: by a copy inside the worker, or by a fork of the whole worker process."""

from __future__ import annotations

from bridle.aici.runtime.pool import WorkerPool
from bridle.aici.runtime.sequences import RuntimeSequence, SequenceTable
from bridle.errors import InvalidRequest

#: Maximum number of seconds for forking a process.
_SPLIT_TIMEOUT = 2.0


class Forks:
    """Forks sequences by copying an instance or by forking the instance's process."""

    def __init__(self, table: SequenceTable, pool: WorkerPool) -> None:
        self._table = table
        self._pool = pool

    def fork(self, parent: RuntimeSequence, seq_id: int, branch: int) -> tuple[RuntimeSequence, int | None]:
        """Fork `parent`. Returns the new sequence. If the worker still has to copy the parent before any callback of
        the step, also returns the parent's key. Raises `BridleError` with the error text for the child's result."""
        if seq_id in self._table.by_id:
            raise InvalidRequest(f"cannot fork into sequence {seq_id}: it exists already")
        if parent.error is not None:
            raise InvalidRequest(f"sequence {parent.seq_id} has failed: {parent.error}")
        if parent.is_outstanding:
            raise InvalidRequest(f"sequence {parent.seq_id} has not answered yet and cannot be forked")
        problem = self._table.check_fork(parent.request)
        if problem:
            raise InvalidRequest(problem)
        key = self._table.new_key()
        worker, copies = parent.worker, True
        if parent.splits:
            worker, copies = self._pool.split(worker, parent.key, key, branch, _SPLIT_TIMEOUT), False
        else:
            worker.keys.add(key)
        child = RuntimeSequence(key, parent.request, worker, seq_id, splits=parent.splits)
        self._table.add(child)
        return child, parent.key if copies else None
