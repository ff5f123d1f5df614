"""Batches of users, and the answers of unfinished batches. A restarted server continues these unfinished batches."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bridle.errors import InvalidRequest, Overloaded, UnknownBatch
from bridle.serving.outputs.saved_records import SavedRecords
from bridle.serving.state_db import StateTable
from bridle.serving.tenancy.keys import Identity
from bridle.serving.tenancy.per_user_store import StoreBounds

#: Limits: seconds after the last change, number of batches of all users and of one, bytes of all users and of one.
BOUNDS = StoreBounds(86_400.0, 4_096, 256, 64 << 20, 16 << 20)
#: Limits with a state file, where batches are kept for 30 days.
SAVED_BOUNDS = replace(BOUNDS, seconds=30 * 86_400.0)
#: Maximum number of unfinished batches of a user.
MAX_OPEN = 16
#: Number of seconds after which a batch expires.
WINDOW = 86_400
_OVER = ("completed", "failed", "expired", "cancelled")
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a user; the user may be an admin. `times` has the Unix time at which each status began."""

    user: str
    is_admin: bool
    id: str
    created: int
    endpoint: str
    input_file_id: str
    metadata: dict[str, str]
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_over(self) -> bool:
        return self.status in _OVER

    @property
    def expires(self) -> int:
        return self.created + WINDOW

    def fields(self) -> dict[str, Any]:
        """Return the batch in the form that clients see."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created,
            "expires_at": self.expires,
            **{f"{name}_at": self.times.get(name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


@dataclass(slots=True)
class Answers:
    """The answers of an unfinished batch, by the number of the line in the batch's file. Each answer is JSON with a
    newline at its end."""

    good: dict[int, bytes] = field(default_factory=dict)
    bad: dict[int, bytes] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, number: int, is_good: bool, line: bytes) -> None:
        (self.good if is_good else self.bad)[number] = line
        self.num_bytes += len(line)


class BatchStore(SavedRecords[Batch]):
    """Keeps batches and their answers. With state tables, the store also has the batches that were saved there. Only
    one thread may use the store. `now` returns the Unix time."""

    kind, unknown, noun, plural = Batch, UnknownBatch, "batch", "batches"
    usual = BOUNDS
    advice = "batches are kept for {:g} s after their last change, within bounds. List your batches"

    def __init__(
        self,
        bounds: StoreBounds = BOUNDS,
        clock: Callable[[], float] = time.monotonic,
        table: StateTable | None = None,
        answers: StateTable | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(bounds, clock, table)
        self._answers, self.now = answers, now
        self.kept_answers: dict[str, Answers] = {}
        for user, name, _, value in () if answers is None else answers.rows():
            batch, _, number = name.partition("/")
            found = self._store.find(user, batch)
            if found is None or found.is_over:
                answers.drop(user, name)  # type: ignore[union-attr]
            else:
                self.kept_answers.setdefault(batch, Answers()).add(int(number), value[:1] == b"+", value[1:])

    def create(self, identity: Identity, endpoint: str, input_file_id: str, metadata: dict[str, str]) -> Batch:
        """Store a new batch. Raises `Overloaded` if the user has too many unfinished batches, or if there is no
        room."""
        num_open = sum(not batch.is_over for batch in self.of(identity.user))
        if num_open >= MAX_OPEN:
            raise Overloaded(
                f"{num_open} batches of this user wait or run; at most {MAX_OPEN}. Wait until one ends, or cancel one"
            )
        made = Batch(
            identity.user,
            identity.is_admin,
            f"batch_{secrets.token_hex(16)}",
            int(self.now()),
            endpoint,
            input_file_id,
            metadata,
        )
        return self.put(made)

    def of(self, user: str | None = None) -> list[Batch]:
        """Return the batches of a user, or of all users (None), the oldest first."""
        return sorted(super().of(user), key=lambda batch: batch.created)

    def unfinished(self) -> list[Batch]:
        """Return the unfinished batches of all users, the oldest first."""
        return [each for each in self.of() if not each.is_over]

    def change(self, batch: Batch, status: str, **values: Any) -> Batch:
        """Set the status and other fields of a batch. Raises `UnknownBatch` if the batch was removed."""
        found = self.find(batch.user, batch.id)
        times = found.times | {status: int(self.now())}
        return self.put(replace(found, status=status, times=times, **values))

    def cancel(self, batch: Batch) -> Batch:
        """Begin to cancel a batch. Raises `InvalidRequest` if the batch has ended."""
        if batch.is_over:
            raise InvalidRequest(
                f"batch: its status is {batch.status}; only a batch that waits or runs can be cancelled"
            )
        return batch if batch.status == "cancelling" else self.change(batch, "cancelling")

    def answers(self, batch: Batch) -> Answers:
        """Return the answers that a batch has so far."""
        return self.kept_answers.setdefault(batch.id, Answers())

    def add_answer(self, batch: Batch, number: int, is_good: bool, line: bytes) -> None:
        """Store the answer to line `number`. Raises `UnknownBatch` if the batch was removed."""
        found, answers = self.find(batch.user, batch.id), self.answers(batch)
        answers.add(number, is_good, line)
        if self._answers is not None:
            mark = b"+" if is_good else b"-"
            self._answers.put(batch.user, f"{batch.id}/{number}", WINDOW + self.bounds.seconds, mark + line)
        self.put(replace(found, completed=len(answers.good), failed=len(answers.bad)))

    def forget_answers(self, batch: Batch) -> None:
        """Delete the stored answers of a batch that has ended or was removed."""
        answers = self.kept_answers.pop(batch.id, Answers())
        if self._answers is not None:
            for number in (*answers.good, *answers.bad):
                self._answers.drop(batch.user, f"{batch.id}/{number}")
