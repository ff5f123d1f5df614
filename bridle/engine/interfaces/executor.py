"""Interface of a compute backend, and its optional capabilities besides steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepPlan, StepResult
from bridle.kv_store.records import Buffer, Snapshot

#: What a model is for: text, vectors of texts, or labels of texts.
Task = Literal["generate", "embed", "classify"]


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Properties of a loaded model that the engine needs. `kv` is the layout of KV. With `paged`, the engine's block
    tables give the slot of every position. With `sequences`, the backend keeps KV by sequence id, copies it on
    `ForkRow` and truncates it to each row's `start`; the engine only counts blocks. `capacity` is `num_blocks *
    block_size` tokens either way. Vectors of an `Embedder` have `embedding_size` elements; 0 if the model gives none.
    `task` is the model's purpose: a model that does not generate gives vectors of whole texts, each computed in one
    step, or the logits of a classifier's labels. `block_bytes` is the memory of one block; 0 if unknown. `unnamed` ids
    have no token: they are read in prompts, and never sampled. A model with recurrent layers has `num_states` slots of
    `state_bytes` each for the states of sequences; 0 for any other model."""

    model: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv: Literal["paged", "sequences"] = "paged"
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    max_num_batched_tokens: int = 512  # what the backend digests well in one step
    max_num_seqs: int = 256
    embedding_size: int = 0
    task: Task = "generate"
    block_bytes: int = 0
    unnamed: PaddedVocab = NONE_UNNAMED
    num_states: int = 0
    state_bytes: int = 0

    @property
    def num_drawable(self) -> int:
        """Ids from this one on are never sampled."""
        return self.unnamed.end_of(self.vocab_size)


class Executor(Protocol):
    """A backend. One thread calls it. `forward` may return before the device is done; `sample` waits for it."""

    @property
    def info(self) -> ExecutorInfo: ...

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan to the mirrors and start computing its rows. Raises `ShardUnavailable` if the device is
        lost (all mirrors are then lost), and another `BridleError` if this plan cannot be run."""

    def sample(self, batch: SampleBatch) -> StepResult:
        """Read tokens and log-probabilities off the logits of the last forward."""

    def reset(self) -> None:
        """Forget every mirror and all KV."""

    def close(self) -> None:
        """Release the device. Idempotent."""


class AsyncExecutor(Executor, Protocol):
    """An executor whose device continues while its caller does other things. `sample` has two parts.

    Between the two, the caller may launch the next step with placeholders for the tokens that are being sampled: the
    device has them. If nothing could be sampled, such a row is computed with any token. The order is `sample_async`, an
    optional forward, `get_result`; `reset` drops results that were not taken. Errors of either part may be raised by
    `get_result`.
    """

    @property
    def is_async(self) -> bool:
        """Return whether asynchronous steps help here; if not, the engine calls `sample` alone."""

    def sample_async(self, batch: SampleBatch) -> None:
        """Begin to read tokens off the logits of the last forward. Returns at once."""

    def get_result(self) -> StepResult:
        """Wait for the results of the last `sample_async`. From then on its tokens have no names any more."""

    def await_forward(self, seconds: float) -> bool:
        """Wait until the device has computed the last forward, at most so long; returns whether it has."""


class KVBlocks(Protocol):
    """The blocks of an executor's KV cache and its slots of recurrent states, as bytes. Blocks that no plan refers to
    may be written from any thread, also while steps run. Where steps may be under way when the engine asks, a copy is a
    `Snapshot` of the time after them, and a write comes after them."""

    @property
    def block_bytes(self) -> int:
        """Size of each block in bytes."""

    @property
    def state_bytes(self) -> int:
        """Size of each slot in bytes; 0 without recurrent layers."""

    def identity(self) -> str:
        """Return a text that identifies weights, number types and layout: it is the same only if equal tokens give the
        same bytes. May read all weights."""

    def read_block(self, block: int) -> Buffer | Snapshot:
        """Return a copy of a block."""

    def write_block(self, block: int, data: memoryview) -> None:
        """Fill a block with bytes that `read_block` has returned."""

    def read_state(self, slot: int) -> Buffer | Snapshot:
        """Return a copy of a slot."""

    def write_state(self, slot: int, data: memoryview) -> None:
        """Fill a slot with bytes that `read_state` has returned."""


class DeviceKVBlocks(KVBlocks, Protocol):
    """Blocks in the memory of a device, that can be kept in the host's memory."""

    def allocate_host(self, num_bytes: int) -> memoryview:
        """Return memory of the host that the device copies from and to by itself. Raises `RuntimeError` if there is
        none."""


class SequenceStates(Protocol):
    """The KV of whole sequences as bytes, of a backend that keeps it by sequence."""

    is_cuttable: bool
    "Whether a sequence can begin with KV of more tokens than it has."

    def identity(self) -> str:
        """As that of `KVBlocks`."""

    def size_of(self, seq_id: int, num_tokens: int) -> int:
        """Return the bytes that `read` would give for a sequence; 0 if the backend does not know it or its KV is not
        that of its first `num_tokens` tokens."""

    def read(self, seq_id: int) -> Buffer:
        """Return the KV of a sequence."""

    def free(self, seq_ids: Sequence[int]) -> None:
        """Forget sequences, as a plan that names them does."""

    def adopt(self, seq_id: int, adapter: str | None, tokens: Sequence[int], state: memoryview) -> bool:
        """Begin a sequence that no plan has named with the KV of these tokens, from the result of `read` for them and
        perhaps more tokens. Returns whether it was begun."""


def find_sequence_states(executor: Executor) -> SequenceStates | None:
    """Return the KV of an executor's sequences if it gives access to them, else None."""
    states: SequenceStates | None = getattr(executor, "sequence_states", None)
    return states if executor.info.kv == "sequences" and find_async(executor) is None else None


def find_kv_blocks(executor: Executor, kind: str = "exact") -> KVBlocks | None:
    """Return the blocks of an executor that gives access to them, else None. `kind` is the format of their bytes: exact
    or int8."""
    blocks: KVBlocks | None = getattr(executor, "kv_blocks" if kind == "exact" else f"{kind}_blocks", None)
    return blocks if executor.info.kv == "paged" else None


def find_device_blocks(executor: Executor, kind: str = "exact") -> DeviceKVBlocks | None:
    """Return the blocks of an executor if they are in the memory of a device, else None."""
    blocks = find_kv_blocks(executor, kind)
    return cast(DeviceKVBlocks, blocks) if hasattr(blocks, "allocate_host") else None


def find_async(executor: Executor) -> AsyncExecutor | None:
    """Return the executor if it is asynchronous, else None."""
    return cast(AsyncExecutor, executor) if getattr(executor, "is_async", False) else None


@runtime_checkable
class SupportsReconnect(Protocol):
    """An executor whose device can be lost for a while, and be available again without any of its state.

    While the device is away the engine computes nothing and keeps all requests. `on_change` is called, from any thread,
    when the device is lost and when it is available again.
    """

    on_change: Callable[[], None]

    @property
    def is_up(self) -> bool:
        """Return whether the device is reachable, as far as is known. Safe from any thread."""


@runtime_checkable
class Embedder(Protocol):
    """An executor that can also return the vector of a text, unless its `info.embedding_size` is 0."""

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Vectors in 32-bit numbers of these logits rows of the last forward, which was step `step` and has been
        sampled. Those of a model that generates are its hidden states, scaled to length 1."""


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
