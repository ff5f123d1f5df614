"""The executor of the llama.cpp backend: it gets step plans and returns tokens. A plan's tokens are computed in as few
batches as possible. llama.cpp applies an adapter to a whole batch, so each adapter in a step has its own batches. One
thread computes steps; other threads may load and free adapters during a step. After an error in a step, the executor
forgets all sequences, like every backend.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from bridle.engine.interfaces import ExecutorInfo, Sampler
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, StepPlan, StepResult
from bridle.errors import BridleError, InternalError, ShardUnavailable
from bridle.llamacpp.adapters import LlamaAdapters
from bridle.llamacpp.library import Cell, Model
from bridle.llamacpp.slot_states import SlotStates
from bridle.llamacpp.slots import Slots, SlotSequence
from bridle.model.executor import check_batch, strike_unnamed


class LlamaExecutor:
    """Implements `bridle.engine.interfaces.Executor` over a model of llama.cpp."""

    def __init__(
        self,
        info: ExecutorInfo,
        model: Model,
        sampler: Sampler,
        adapters: LlamaAdapters,
        kv_bytes: int,
        identity: Callable[[], str] = str,
    ) -> None:
        self.info = info
        self._model: Model | None = model
        self.sampler = sampler
        self.adapters = adapters
        self._kv_bytes = kv_bytes
        self._slots = Slots(model, info.vocab_size, info.max_model_len)
        self.sequence_states = SlotStates(model, self._slots, identity)
        self._step: int | None = None
        self.logits: Tensor | None = None  # [R, V] of the last step
        self._rows: list[tuple[int, int]] = []  # sequence and position of each row of logits
        self._used: dict[int, str | None] = {}  # adapters of the last step's sequences

    @property
    def num_bytes(self) -> int:
        """Return the bytes of weights and KV cache; 0 once the executor is closed."""
        return 0 if self._model is None else self._model.num_bytes + self._kv_bytes

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan and compute its rows. Raises `InternalError` for a stale plan or a failed step. A failed step
        also makes the executor forget all sequences."""
        model = self._require_model()
        if self._step is not None and plan.step <= self._step:
            raise InternalError(f"the plan of step {plan.step} is stale: step {self._step} has been run")
        self._step, self.logits, self._rows = plan.step, None, []
        try:
            held = self._slots.apply(plan)
            with self.adapters.lock:
                self.logits = self._run(model, plan.rows, held)
        except BridleError as error:
            self._forget()
            raise InternalError(f"step {plan.step} ({plan.num_tokens} tokens) failed: {error}") from error

    def sample(self, batch: SampleBatch) -> StepResult:
        """Return tokens and log-probabilities from the logits of the last step."""
        self._require_model()
        if batch.step != self._step:
            raise InternalError(f"the batch is of step {batch.step}; the last forward pass was step {self._step}")
        if not batch.rows and not batch.scores:
            return StepResult(batch.step)
        check_batch(batch, 0 if self.logits is None else self.logits.shape[0])
        with torch.inference_mode():
            strike_unnamed(self.logits, batch)
            return self.sampler(self.logits, batch, self.history)

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Return the hidden states of the batch rows `logits_rows` before the output head, each scaled to length 1.
        llama.cpp does not store hidden states, so the tokens of these rows and all later tokens are computed again."""
        model = self._require_model()
        if step != self._step:
            raise InternalError(f"got step {step} for embeddings; the last forward pass was step {self._step}")
        for row in logits_rows:
            if not 0 <= row < len(self._rows):
                raise InternalError(f"step {step} has {len(self._rows)} logits rows; embeddings need row {row}")
        with self.adapters.lock, torch.inference_mode():
            vectors = [self._embed(model, *self._rows[row]) for row in logits_rows]
        return [array("f", functional.normalize(vector, dim=-1).numpy().tobytes()) for vector in vectors]

    def reset(self) -> None:
        """Forget all sequences. The next step may have any number."""
        self._forget()
        self._step = None

    def close(self) -> None:
        """Release model and context. Idempotent."""
        self.reset()
        if self._model is not None:
            self.adapters.clear()
            self._model.close()
        self._model = None

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _run(self, model: Model, rows: Sequence[PlanRow], held: Sequence[SlotSequence]) -> Tensor:
        """Compute all batch rows, one batch per adapter; return logits [R, V] in the order of the batch rows."""
        starts: dict[str | None, list[int]] = {}
        for at, row in enumerate(rows):
            starts.setdefault(row.adapter, []).append(at)
        self._used = {row.seq_id: row.adapter for row in rows}
        found: dict[int, Tensor] = {}
        for adapter, members in starts.items():
            with self.adapters.applied(adapter):
                logits = self._decode(model, [cell for at in members for cell in _cells(rows[at], held[at])])
            sizes = [rows[at].num_logits for at in members]
            found |= dict(zip(members, torch.split(logits, sizes), strict=True))
        for row in rows:
            end = row.start + row.num_scheduled
            self._rows += [(row.seq_id, place) for place in range(end - row.num_logits, end)]
        ordered = [found[at] for at in range(len(rows))]
        return torch.cat(ordered) if ordered else torch.empty(0, self.info.vocab_size)

    def _decode(self, model: Model, cells: Sequence[Cell]) -> Tensor:
        size = model.max_batch
        parts = [model.decode(cells[at : at + size]) for at in range(0, len(cells), size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _embed(self, model: Model, seq_id: int, position: int) -> Tensor:
        held = self._slots[seq_id]
        first = self._slots.rewind(held, position)
        tail = held.tokens[first : held.length]
        cells = [Cell(token, place, held.slot, True) for place, token in enumerate(tail, first)]
        with self.adapters.applied(self._used[seq_id]):
            parts = [model.embed(cells[at : at + model.max_batch]) for at in range(0, len(cells), model.max_batch)]
        held.stored = held.length
        return torch.cat(parts)[position - first]

    def history(self, row: SampleRow) -> tuple[Sequence[int], int]:
        held = self._slots[row.seq_id]
        return row.history(held.tokens), held.num_prompt

    def _forget(self) -> None:
        if self._model is not None:
            self._model.clear()
        self._slots.clear()
        self.logits, self._rows = None, []

    def _require_model(self) -> Model:
        if self._model is None:
            raise ShardUnavailable(f"the executor of {self.info.model!r} is closed")
        return self._model


def _cells(row: PlanRow, held: SlotSequence) -> Iterator[Cell]:
    end = row.start + row.num_scheduled
    first = end - row.num_logits
    for position in range(held.first, end):
        yield Cell(held.tokens[position], position, held.slot, position >= first)
