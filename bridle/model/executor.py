"""The in-process executor: it gets step plans and returns tokens. The executor keeps copies of the sequences, packs the
rows of each plan, runs the model once, and passes the logits to the sampler. Only one thread calls the executor. After
an error in a step, the executor forgets all sequences, and the process stays alive. The engine then computes the
sequences again, one at a time, so that only the sequence that causes the error ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bridle.control_vectors import ControlVectors
from bridle.engine.interfaces import AsyncSampler, ExecutorInfo, Sampler
from bridle.engine.sampling.padded_vocab import PaddedVocab
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, StepPlan, StepResult
from bridle.errors import BridleError, DeviceLost, InternalError, ShardUnavailable
from bridle.model.adapters import ModelAdapters, check_complete
from bridle.model.async_sampling import AsyncSampling
from bridle.model.batch_inputs import PackedStep, pack_step
from bridle.model.device_blocks import DeviceBlocks
from bridle.model.h2d_copies import upload_list
from bridle.model.input_batch import InputBatch
from bridle.model.int8_blocks import Heads, Int8Blocks, Int8Codec
from bridle.model.kv_blocks import CacheBlocks
from bridle.model.layer_taps import ProbeReader, probe_reader, vector_tap
from bridle.model.media_device import LocalMedia
from bridle.model.partial_logits import PartialLogits
from bridle.model.runner import ModelRunner


class LocalExecutor:
    """Implements `bridle.engine.interfaces.Executor` over a torch model in this process."""

    def __init__(
        self,
        info: ExecutorInfo,
        runner: ModelRunner,
        sampler: Sampler,
        num_ids: int,
        device: torch.device,
        adapters: ModelAdapters | None = None,
        media: LocalMedia | None = None,
        identity: Callable[[], str] | None = None,
        control_vectors: ControlVectors | None = None,
    ) -> None:
        self.info = info
        self.adapters = adapters
        self.draft: LocalExecutor | None = None  # of the model that proposes draft tokens for this one
        self.media = media
        self.control_vectors = control_vectors
        self._runner: ModelRunner | None = runner
        self.sampler = sampler
        self._early = sampler if isinstance(sampler, AsyncSampler) else None
        self._device = device
        self._identity = identity  # of the KV that this model computes
        self._mirrors = InputBatch(info.num_blocks, info.block_size, info.max_model_len, num_ids)
        self._step: int | None = None
        self.logits: Tensor | PartialLogits | None = None  # [R, V] of the last forward pass
        self._reader: ProbeReader | None = None  # of the last forward pass
        self._drawn: tuple[ProbeReader | None, Sequence[SampleRow]] = None, ()  # of the sampling in progress
        self.async_sampling = AsyncSampling(device)

    @property
    def runner(self) -> ModelRunner:
        """Return the runner of the model, for benchmarks that bypass the engine. Raises `ShardUnavailable` once the
        executor is closed."""
        return self._require_runner()

    @property
    def kv_blocks(self) -> CacheBlocks | DeviceBlocks | None:
        """Return access to KV blocks and recurrent states for a KV store; None for devices other than CPUs and CUDA
        GPUs."""
        if self._identity is None or self._device.type not in ("cpu", "cuda"):
            return None
        attention = self._require_runner().attention
        kind = CacheBlocks if self._device.type == "cpu" else DeviceBlocks
        return kind(attention.cache, self._identity, attention.states)

    @property
    def int8_blocks(self) -> Int8Blocks | None:
        """Return `kv_blocks` with values converted to 8 bits; None if `kv_blocks` is None or the KV cache already has
        8-bit values."""
        blocks, cache = self.kv_blocks, self._require_runner().attention.cache
        layers = [(layer.keys, layer.values) for layer in cache.layers.values()]
        dtypes = {str(part.dtype).removeprefix("torch.") for parts in layers for part in parts}
        if blocks is None or len(dtypes) != 1 or not dtypes <= {"float32", "float16", "bfloat16"}:
            return None
        heads = [Heads(cache.block_size * part.shape[1], part.shape[2]) for parts in layers for part in parts]
        return Int8Blocks(blocks, Int8Codec(heads, *dtypes))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of weights and KV cache, including those of the draft model; 0 once the executor is
        closed."""
        beside = 0 if self.draft is None else self.draft.num_bytes
        return beside if self._runner is None else self._runner.num_bytes + beside

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan, and run the model on the plan's rows. On CUDA, this method returns before the device has
        finished the step. Raises `InternalError` for a stale or inconsistent plan, for example if an adapter is not on
        the device; in this case the plan changes nothing. Also raises `InternalError` if the step fails after it began;
        the executor then forgets all sequences and their KV.
        """
        runner = self._require_runner()
        self._check_plan(plan)
        mirrors = self._mirrors.apply(plan)
        self._step, self.logits = plan.step, None
        try:
            if plan.copies:
                runner.attention.cache.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
            if plan.state_copies and (states := runner.attention.states) is not None:
                states.copy([(copy.source, copy.target) for copy in plan.state_copies])
            if plan.rows:
                words = getattr(runner.attention.kernel, "words", None)
                self._reader = probe_reader(plan.rows, self.control_vectors)
                tap = vector_tap(plan.rows, self.control_vectors, self._reader)
                graphs = runner.graphs if tap is None else None
                step = pack_step(plan.rows, mirrors, self.info.block_size, self._device, words, graphs)
                if self.async_sampling.note_names(plan.rows, mirrors):
                    ids = self.async_sampling.fill(step.input_ids)
                    step.input_ids = ids if step.replay is None else step.input_ids.copy_(ids)
                with runner.tapped(tap):
                    self.logits = self._run(runner, step, plan)
                self.async_sampling.mark_forward()
        except Exception as error:
            raise self._lose(error, f"step {plan.step} ({plan.num_tokens} tokens)") from error

    def sample(self, batch: SampleBatch) -> StepResult:
        """Return tokens and log-probabilities from the logits of the last forward pass. Waits for the device.

        May be called several times per step. Raises `InternalError` if `batch` belongs to another step.
        """
        return _with_probes(self._reader, batch.rows, self._read(batch, self.sampler))

    @property
    def is_async(self) -> bool:
        """Return whether `sample_async` returns before the device has sampled."""
        return self._device.type == "cuda" and self._early is not None

    def sample_async(self, batch: SampleBatch) -> None:
        """Begin sampling `batch`; `get_result` returns the result. If the sampler is not an `AsyncSampler`, this call
        samples at once and waits."""
        self.async_sampling.start(self._read(batch, self.sampler if self._early is None else self._early.draw))
        self._mirrors.num_names = len(batch.rows)
        self._drawn = self._reader, batch.rows

    def get_result(self) -> StepResult:
        """Wait for the results of `sample_async`."""
        self._require_runner()
        self._mirrors.num_names = 0
        try:
            return _with_probes(*self._drawn, self.async_sampling.take())
        except (RuntimeError, MemoryError) as error:
            raise self._lose(error, f"sampling of step {self._step}") from error

    def await_forward(self, seconds: float) -> bool:
        """Wait at most `seconds` until the device has computed the last forward pass. Return whether the forward pass
        is complete."""
        return self.async_sampling.await_forward(seconds)

    def _read(self, batch: SampleBatch, sampler: Callable[..., Any]) -> Any:
        """Call `sampler` for a batch of the last step, and return its result; an empty result if the batch is empty."""
        self._require_runner()
        if batch.step != self._step:
            raise InternalError(f"the batch is of step {batch.step}; the last forward pass was step {self._step}")
        if not batch.rows and not batch.scores:
            return StepResult(batch.step)
        logits = self.logits
        check_batch(batch, 0 if logits is None else logits.shape[0])
        try:
            with torch.inference_mode():
                if isinstance(logits, PartialLogits):
                    return logits.sample(batch, self.sampler, self.history, _strike)
                strike_unnamed(logits, batch)
                return sampler(logits, batch, self.history)
        except InternalError:
            raise
        except (RuntimeError, MemoryError) as error:
            raise self._lose(error, f"sampling of step {batch.step}") from error

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Return the last forward pass's inputs of the output head for `logits_rows`, scaled to length 1."""
        hidden = self._require_runner().hidden
        if step != self._step or hidden is None:
            raise InternalError(f"got step {step} for embeddings; the last forward pass was step {self._step}")
        for row in logits_rows:
            if not 0 <= row < hidden.shape[0]:
                raise InternalError(f"step {step} has {hidden.shape[0]} logits rows; embeddings need row {row}")
        with torch.inference_mode():
            rows = upload_list(logits_rows, torch.int64, hidden.device)
            picked = hidden.index_select(0, rows).float()  # [N, hidden]
            vectors = functional.normalize(picked, dim=-1).cpu().numpy()
        return [array("f", vector.tobytes()) for vector in vectors]

    def reset(self) -> None:
        """Forget every sequence. The next step may have any number."""
        self._mirrors.clear()
        self.async_sampling.reset()
        self._step = self.logits = None

    @contextmanager
    def trying(self, num_blocks: int) -> Iterator[None]:
        """In the `with` block, steps allocate their usual memory but may skip layers, so their results are meaningless.
        The first `num_blocks` blocks of the KV pool are filled with zeros, so that no step reads undefined values."""
        runner = self._require_runner()
        with runner.first_layers() as layers:
            runner.attention.cache.clear(num_blocks, layers)
            yield

    def close(self) -> None:
        """Release the model and the KV pool. Idempotent."""
        self.reset()
        if self.adapters is not None:
            self.adapters.clear()
        if self.draft is not None:
            self.draft.close()
        if self.media is not None:
            self.media.clear()
        if self._runner is not None:
            self._runner.graphs = None  # the graphs refer to this executor, and would keep it alive
        self._runner = self.adapters = self.media = None
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # a device that is lost refuses this call, too
                torch.cuda.empty_cache()

    # -- helpers -------------------------------------------------------------------------------------------

    def _run(self, runner: ModelRunner, step: PackedStep, plan: StepPlan) -> Tensor | PartialLogits:
        if self.adapters is None or step.replay is not None:  # a graph contains its adapters
            return runner.run_in_parts(step)
        adapted = self.adapters.begin_step(plan.rows)
        if adapted is None:
            return runner.run_in_parts(step)
        with self.adapters.applied(adapted):
            logits = runner.run(step)
        check_complete(adapted)
        return logits

    def history(self, row: SampleRow) -> tuple[Sequence[int], int]:
        mirror = self._mirrors[row.seq_id]
        return row.history(mirror.tokens), mirror.num_prompt

    def _require_runner(self) -> ModelRunner:
        if self._runner is None:
            raise ShardUnavailable("the executor is closed")
        return self._runner

    def _check_plan(self, plan: StepPlan) -> None:
        if self._step is not None and plan.step <= self._step:
            raise InternalError(f"the plan of step {plan.step} is stale: step {self._step} has been run")
        for row in plan.rows:
            if row.adapter is not None and (self.adapters is None or row.adapter not in self.adapters):
                raise InternalError(f"sequence {row.seq_id} wants adapter {row.adapter!r}, which is not on the device")
            self._check_vectors(row)
            slots = [row.state, *(save.slot for save in row.saves)] if self.info.num_states else []
            if any(not 0 <= slot < self.info.num_states for slot in slots):
                raise InternalError(f"sequence {row.seq_id} has state slots {slots}; there are {self.info.num_states}")
            if row.runs and self.media is None:
                raise InternalError(f"sequence {row.seq_id} has images, but this model reads none")

    def _check_vectors(self, row: PlanRow) -> None:
        for key in row.vector_keys:
            if self.control_vectors is None or key not in self.control_vectors:
                raise InternalError(f"sequence {row.seq_id} wants control vector {key!r}, which is not loaded")

    def _lose(self, error: Exception, what: str) -> BridleError:
        """Forget all copies of sequences, because a step failed and left them in an unknown state. Return an
        `InternalError` for the failed step, so that the engine searches for the sequence that causes the failure. If
        the device itself failed, return `DeviceLost`."""
        self._mirrors.clear()
        self.logits = None
        if not is_sound(self._device):
            return DeviceLost(f"{what} failed, and {self._device} with it: {type(error).__name__}: {error}")
        return InternalError(f"{what} failed on {self._device}: {type(error).__name__}: {error}")


def _with_probes(reader: ProbeReader | None, rows: Sequence[SampleRow], result: StepResult) -> StepResult:
    if reader is not None:
        readings = reader.readings()
        result.probes = [readings.get(row.logits_index, ()) for row in rows]
    return result


def is_sound(device: torch.device) -> bool:
    """Return whether a device still works. After some errors, such as an invalid memory access, all further GPU calls
    of the process fail."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def strike_unnamed(logits: Tensor | None, batch: SampleBatch) -> None:
    """Set the logits [R, V] of ids without a token to -inf, so that no sampler chooses them."""
    if batch.unnamed and logits is not None:
        _strike(logits, batch.unnamed)


def _strike(logits: Tensor, unnamed: PaddedVocab) -> None:
    if unnamed and unnamed.end > logits.shape[1]:
        raise InternalError(f"padding id {unnamed.end - 1} is outside of a row of {logits.shape[1]} logits")
    if unnamed:
        logits.index_fill_(1, _columns(unnamed, logits.device), -torch.inf)


@lru_cache(maxsize=16)
def _columns(unnamed: PaddedVocab, device: torch.device) -> Tensor:
    return upload_list(list(unnamed), torch.int64, device)


def check_batch(batch: SampleBatch, num_rows: int) -> None:
    """Raise `InternalError` if `batch` refers to a row outside the `num_rows` rows of logits."""
    for row in batch.rows:
        if not 0 <= row.logits_index < num_rows:
            raise InternalError(
                f"sequence {row.seq_id} reads logits row {row.logits_index} of {num_rows} rows in step {batch.step}"
            )
    for run in batch.scores:
        if run.logits_start < 0 or run.logits_start + len(run.tokens) > num_rows:
            raise InternalError(
                f"sequence {run.seq_id} scores {len(run.tokens)} tokens from logits row {run.logits_start} "
                f"of {num_rows} rows in step {batch.step}"
            )
