"""Interface of a compute backend, and its optional capabilities."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepPlan, StepResult
from bridle.kv_store.records import Buffer, Snapshot

#: Purpose of a model: generate text, compute vectors of texts, or label texts.
Task = Literal["generate", "embed", "classify"]


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Properties of a loaded model that the engine needs. `kv` is the layout of KV. With `paged`, the engine's block
    tables give the slot of every position. With `sequences`, the backend keeps KV by sequence id, copies it on
    `ForkRow` and truncates it to each row's `start`; the engine only counts blocks. In both layouts the capacity is
    `num_blocks * block_size` tokens. Vectors of an `Embedder` have `embedding_size` elements; 0 if the model gives no
    vectors. `task` is the model's purpose: a model that does not generate gives vectors of whole texts, each computed
    in one step, or the logits of a classifier's labels. `block_bytes` is the memory of one block; 0 if unknown.
    `unnamed` ids have no token: prompts may contain them, but they are never sampled. A model with recurrent layers has
    `num_states` slots of `state_bytes` each for the states of sequences; 0 for any other model."""

    model: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv: Literal["paged", "sequences"] = "paged"
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    max_num_batched_tokens: int = 512  # number of tokens that the backend computes efficiently in one step
    max_num_seqs: int = 256
    embedding_size: int = 0
    task: Task = "generate"
    block_bytes: int = 0
    unnamed: PaddedVocab = NONE_UNNAMED
    num_states: int = 0
    state_bytes: int = 0

    @property
    def num_drawable(self) -> int:
        """Return the number of ids that can be sampled: ids from this one on are never sampled."""
        return self.unnamed.end_of(self.vocab_size)


class Executor(Protocol):
    """A backend. One thread calls it. `forward` may return before the device is done; `sample` waits for it."""

    @property
    def info(self) -> ExecutorInfo: ...

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan's changes of sequences and start computing its rows. Raises `ShardUnavailable` if the device
        is lost (all sequences on it are then lost), and another `BridleError` if this plan cannot be run."""

    def sample(self, batch: SampleBatch) -> StepResult:
        """Sample tokens and compute log-probabilities from the logits of the last forward."""

    def reset(self) -> None:
        """Forget every sequence and all KV."""

    def close(self) -> None:
        """Release the device. Idempotent."""


class AsyncExecutor(Executor, Protocol):
    """An executor whose device continues to compute while the engine does other work. `sample` has two parts.

    Between the two parts, the caller may launch the next step with placeholders for the tokens that are being sampled:
    the device has these tokens. If no token could be sampled for such a row, it is computed with any token. The order
    is `sample_async`, an optional forward, `get_result`; `reset` drops results that were not taken. Errors of either
    part may be raised by `get_result`.
    """

    @property
    def is_async(self) -> bool:
        """Return whether asynchronous steps help on this device; if not, the engine calls `sample` alone."""

    def sample_async(self, batch: SampleBatch) -> None:
        """Start sampling tokens from the logits of the last forward. Returns at once."""

    def get_result(self) -> StepResult:
        """Wait for the results of the last `sample_async`. After that, placeholders for its tokens are invalid."""

    def await_forward(self, seconds: float) -> bool:
        """Wait at most `seconds` until the device has computed the last forward. Returns whether it has."""


class KVBlocks(Protocol):
    """The blocks of an executor's KV cache and its slots of recurrent states, as bytes. Blocks that no plan refers to
    may be written from any thread, also while steps run. If steps may be running when the engine asks, a copy is a
    `Snapshot` of the time after those steps, and a write happens after them."""

    @property
    def block_bytes(self) -> int:
        """Return the size of each block in bytes."""

    @property
    def state_bytes(self) -> int:
        """Return the size of each slot in bytes; 0 without recurrent layers."""

    def identity(self) -> str:
        """Return a text that identifies weights, number types and layout. Two identities are equal only if equal tokens
        give the same bytes. May read all weights."""

    def read_block(self, block: int) -> Buffer | Snapshot:
        """Return a copy of the bytes of a block."""

    def write_block(self, block: int, data: memoryview) -> None:
        """Fill a block with bytes that `read_block` returned."""

    def read_state(self, slot: int) -> Buffer | Snapshot:
        """Return a copy of the bytes of a slot."""

    def write_state(self, slot: int, data: memoryview) -> None:
        """Fill a slot with bytes that `read_state` returned."""


class DeviceKVBlocks(KVBlocks, Protocol):
    """Blocks in the memory of a device that can be kept in the host's memory."""

    def allocate_host(self, num_bytes: int) -> memoryview:
        """Return host memory that the device copies from and to by itself. Raises `RuntimeError` if no such memory is
        available."""


class SequenceStates(Protocol):
    """The KV of whole sequences as bytes, for a backend that keeps KV by sequence."""

    is_cuttable: bool
    "Whether a sequence can begin with a prefix of the tokens of stored KV."

    def identity(self) -> str:
        """Return a text that identifies weights, number types and layout, as `KVBlocks.identity` does."""

    def size_of(self, seq_id: int, num_tokens: int) -> int:
        """Return the bytes that `read` would give for a sequence. Returns 0 if the backend does not know the sequence,
        or if its KV is not the KV of its first `num_tokens` tokens."""

    def read(self, seq_id: int) -> Buffer:
        """Return the KV of a sequence."""

    def free(self, seq_ids: Sequence[int]) -> None:
        """Forget sequences, as a plan does that lists them as freed."""

    def adopt(self, seq_id: int, adapter: str | None, tokens: Sequence[int], state: memoryview) -> bool:
        """Begin a new sequence with the KV of these tokens. `state` is the result of `read` for these tokens, perhaps
        followed by more. Returns whether the sequence was begun."""


def find_sequence_states(executor: Executor) -> SequenceStates | None:
    """Return the KV of whole sequences if the executor gives access to it, else None."""
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
    """An executor whose device can be lost for a while. The device then returns without any of its state.

    While the device is away, the engine computes nothing and keeps all requests. `on_change` is called, from any
    thread, when the device is lost and when it is available again.
    """

    on_change: Callable[[], None]

    @property
    def is_up(self) -> bool:
        """Return whether the device is reachable, as far as the executor knows. Safe from any thread."""


@runtime_checkable
class Embedder(Protocol):
    """An executor that can also return the vector of a text, unless its `info.embedding_size` is 0."""

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Return the vectors, in 32-bit floats, of these logits rows of the last forward, which was step `step` and was
        sampled. For a model that generates, a vector is the hidden state, scaled to length 1."""


class Sampler(Protocol):
    """Samples tokens from logits. `logits` is the backend's `[R, V]` array. `history(row)` returns the tokens before a
    row's sampled token, and how many of them are prompt. Row i of the result answers `batch.rows[i]`."""

    def __call__(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> StepResult: ...


class PendingSample(Protocol):
    """Tokens that are being sampled."""

    @property
    def tokens(self) -> Any:
        """Return the tokens as an integer tensor [rows] on the device, in the order of the batch. A row from which no
        token could be sampled has a number below 0. Return None if the host has to wait for the tokens."""

    def take(self) -> StepResult:
        """Wait for the tokens and return them. Called once."""


@runtime_checkable
class AsyncSampler(Sampler, Protocol):
    """A sampler that can run without waiting for its result. Calling it is the same as `draw` followed by `take`."""

    def draw(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> PendingSample:
        """Start sampling for `batch`. When this returns, the next work launched on the device may overwrite
        `logits`."""


class HistoryLookup(Protocol):
    def __call__(self, row: SampleRow) -> tuple[Sequence[int], int]: ...
