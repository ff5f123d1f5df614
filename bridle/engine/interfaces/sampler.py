"""Interface of a sampler for backends whose logits are their own arrays. No tensor type appears here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepResult


class Sampler(Protocol):
    """Logits to tokens. `logits` is the backend's `[R, V]` array; `history(row)` returns the tokens before a row's
    sampled token, and how many of them are prompt. Row i of the result answers `batch.rows[i]`."""

    def __call__(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> StepResult: ...


class PendingSample(Protocol):
    """Tokens that are being sampled."""

    @property
    def tokens(self) -> Any:
        """Return the tokens as an integer tensor [rows] on the device, in the order of the batch. A row from which no
        token could be sampled has a number below 0. Return None if the host has to wait for the tokens."""

    def take(self) -> StepResult:
        """Wait for them. Called once."""


@runtime_checkable
class AsyncSampler(Sampler, Protocol):
    """A sampler that need not be waited for. Calling it is `draw` followed by `take`."""

    def draw(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> PendingSample:
        """Start answering `batch`. When this returns, whatever is launched next may overwrite `logits`."""


class HistoryLookup(Protocol):
    def __call__(self, row: SampleRow) -> tuple[Sequence[int], int]: ...
