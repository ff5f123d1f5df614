"""Implements `Executor` for pooling models. Each row of a plan is a whole text. One packed pass computes all rows, and
`embed` returns their vectors. Since `info.task` says that the model does not generate, the scheduler never splits a
text. There is no KV cache, and nothing about a text is kept after its step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, StepPlan, StepResult
from bridle.errors import InternalError, ShardUnavailable
from bridle.model.h2d_copies import upload_list
from bridle.model.pooling.model import PooledModel


class PooledExecutor:
    """Implements `Executor` and `Embedder` over a pooling model."""

    def __init__(self, info: ExecutorInfo, model: PooledModel, device: torch.device) -> None:
        self.info = info
        self._model: PooledModel | None = model
        self._device = device
        self._step: int | None = None
        self._vectors: Tensor | None = None  # [rows, size] of the last forward pass

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights; 0 once the executor is closed."""
        return 0 if self._model is None else self._model.num_bytes

    def forward(self, plan: StepPlan) -> None:
        """Compute the texts of the plan. Raises `InternalError` for a stale plan, or a plan with only a part of a
        text."""
        model = self._require_model()
        if self._step is not None and plan.step <= self._step:
            raise InternalError(f"the plan of step {plan.step} is stale: step {self._step} has been run")
        texts = [_whole_text(row) for row in plan.rows]
        self._step, self._vectors = plan.step, None
        try:
            self._vectors = model.run(texts) if texts else None
        except (RuntimeError, MemoryError, IndexError) as error:
            what = f"step {plan.step} ({plan.num_tokens} tokens)"
            raise InternalError(f"{what} failed on {self._device}: {type(error).__name__}: {error}") from error

    def sample(self, batch: SampleBatch) -> StepResult:
        """Return an empty result, because a pooling model samples no tokens."""
        if batch.step != self._step:
            raise InternalError(f"the batch is of step {batch.step}; the last forward pass was step {self._step}")
        if batch.rows or batch.scores:
            raise InternalError(f"{len(batch.rows)} tokens are to be sampled, but a pooling model does not generate")
        return StepResult(batch.step)

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Return the vectors of the rows `logits_rows` of the last plan, without further changes such as
        normalization."""
        self._require_model()
        vectors = self._vectors
        if step != self._step or vectors is None:
            raise InternalError(f"got step {step} for embeddings; the last forward pass was step {self._step}")
        for row in logits_rows:
            if not 0 <= row < vectors.shape[0]:
                raise InternalError(f"step {step} has {vectors.shape[0]} texts; embeddings need row {row}")
        picked = vectors.index_select(0, upload_list(logits_rows, torch.int64, vectors.device)).cpu().numpy()
        return [array("f", vector.tobytes()) for vector in picked]

    def reset(self) -> None:
        """Forget the last step. The next step may have any number."""
        self._step = self._vectors = None

    def close(self) -> None:
        """Release the model. Idempotent."""
        self.reset()
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _require_model(self) -> PooledModel:
        if self._model is None:
            raise ShardUnavailable("the executor is closed")
        return self._model


def _whole_text(row: PlanRow) -> tuple[int, ...]:
    """Return the tokens of the text in a plan row. Raises `InternalError` if the row lacks a part of its text."""
    if row.start or row.num_kept or row.num_scheduled != len(row.new_tokens) or not row.new_tokens:
        raise InternalError(
            f"sequence {row.seq_id} is scheduled from position {row.start} to {row.start + row.num_scheduled}; "
            "a pooling model needs the whole text at once"
        )
    return row.new_tokens
