"""Interface of a compute backend, and of its optional capabilities."""

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
    """Properties of a loaded model that the engine needs. `kv` is the layout of the KV cache. With `paged`, the
    engine's block tables give the slot of every position. With `sequences`, the backend keeps KV by sequence id, copies
    it on `ForkRow`, and truncates it to each row's `start`. The engine only counts blocks. In both layouts the capacity
    is `num_blocks * block_size` tokens. The vectors of an `Embedder` have `embedding_size` elements; 0 if the model
    gives no vectors. `task` is the model's purpose. A model that does not generate gives a vector of a whole text, or
    the logits of a classifier's labels, in one step. `block_bytes` is the memory of one block; 0 if unknown. Ids in
    `unnamed` have no token: prompts may contain them, but they are never sampled. A model with recurrent layers has
    `num_states` slots of `state_bytes` bytes for the states of sequences; 0 for other models."""

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
        """Return the number of ids that can be sampled. Ids from the returned number on are never sampled."""
        return self.unnamed.end_of(self.vocab_size)


class Executor(Protocol):
    """A backend. Only one thread calls an executor. `forward` may return before the device has finished; `sample` waits
    for the device."""

    @property
    def info(self) -> ExecutorInfo: ...

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan's changes of sequences and start to compute the plan's rows. Raises `ShardUnavailable` if the
        device is lost; all sequences on it are then lost. Raises another `BridleError` if this plan cannot be
        computed."""

    def sample(self, batch: SampleBatch) -> StepResult:
        """Sample tokens and compute log-probabilities from the logits of the last forward pass."""

    def reset(self) -> None:
        """Delete all sequences and all KV."""

    def close(self) -> None:
        """Release the device. Idempotent."""


class AsyncExecutor(Executor, Protocol):
    """An executor whose device computes while the engine does other work. Sampling has two parts: `sample_async` starts
    it, and `get_result` returns the tokens.

    Between `sample_async` and `get_result`, the caller may start the next step with placeholders for tokens that are
    being sampled. The device already has the sampled tokens. If no token could be sampled for a row, its placeholder
    stands for an arbitrary token. The order of calls is `sample_async`, an optional `forward`, `get_result`; `reset`
    drops results that were not taken. Errors of `sample_async` may be raised only by `get_result`.
    """

    @property
    def is_async(self) -> bool:
        """Return True if asynchronous steps are faster on this device. If asynchronous steps are not faster, the engine
        calls only `sample`."""

    def sample_async(self, batch: SampleBatch) -> None:
        """Start to sample tokens from the logits of the last forward pass. Returns at once."""

    def get_result(self) -> StepResult:
        """Wait for the results of the last `sample_async`. When the results are returned, placeholders for the sampled
        tokens become invalid."""

    def await_forward(self, seconds: float) -> bool:
        """Wait at most `seconds` until the device has computed the last forward pass. Returns True if the device has
        finished."""


class KVBlocks(Protocol):
    """The blocks of an executor's KV cache, and the slots of its recurrent states, as bytes. Any thread may write
    blocks that no plan refers to, even while steps run. A copy of a block that the engine requests while steps run is a
    `Snapshot` of the block after these steps. A block that is written while steps run also changes after these
    steps."""

    @property
    def block_bytes(self) -> int:
        """Return the size of a block in bytes."""

    @property
    def state_bytes(self) -> int:
        """Return the size of a state slot in bytes; 0 without recurrent layers."""

    def identity(self) -> str:
        """Return a text that identifies the weights, number types and layout of the KV. Two identities are equal only
        if equal tokens give KV with the same bytes. This method may read all weights."""

    def read_block(self, block: int) -> Buffer | Snapshot:
        """Return a copy of the bytes of a block."""

    def write_block(self, block: int, data: memoryview) -> None:
        """Fill a block with bytes that `read_block` returned."""

    def read_state(self, slot: int) -> Buffer | Snapshot:
        """Return a copy of the bytes of a state slot."""

    def write_state(self, slot: int, data: memoryview) -> None:
        """Fill a state slot with bytes that `read_state` returned."""


class DeviceKVBlocks(KVBlocks, Protocol):
    """Blocks in device memory that can also be kept in the host's memory."""

    def allocate_host(self, num_bytes: int) -> memoryview:
        """Return host memory that the device can access directly (pinned memory). Raises `RuntimeError` if no pinned
        memory is available."""


class SequenceStates(Protocol):
    """The KV of whole sequences as bytes, for a backend that keeps KV by sequence."""

    is_cuttable: bool
    "Whether a new sequence can use the first part of a stored sequence's KV, without the rest."

    def identity(self) -> str:
        """Return a text that identifies the weights, number types and layout of the KV, as `KVBlocks.identity` does."""

    def size_of(self, seq_id: int, num_tokens: int) -> int:
        """Return the number of bytes that `read` would return for a sequence. Returns 0 if the backend does not have
        the sequence, or if its KV does not belong to its first `num_tokens` tokens."""

    def read(self, seq_id: int) -> Buffer:
        """Return the KV of a sequence."""

    def free(self, seq_ids: Sequence[int]) -> None:
        """Delete sequences, like a plan that lists them as freed."""

    def adopt(self, seq_id: int, adapter: str | None, tokens: Sequence[int], state: memoryview) -> bool:
        """Begin a new sequence with the stored KV of `tokens`. `state` is what `read` returned for a sequence that
        starts with `tokens`. Returns whether the sequence was begun."""


def find_sequence_states(executor: Executor) -> SequenceStates | None:
    """Return the executor's access to the KV of whole sequences, or None if it has none."""
    states: SequenceStates | None = getattr(executor, "sequence_states", None)
    return states if executor.info.kv == "sequences" and find_async(executor) is None else None


def find_kv_blocks(executor: Executor, kind: str = "exact") -> KVBlocks | None:
    """Return the executor's access to its KV blocks, or None if it has none. `kind` is the format of the blocks' bytes:
    exact or int8."""
    blocks: KVBlocks | None = getattr(executor, "kv_blocks" if kind == "exact" else f"{kind}_blocks", None)
    return blocks if executor.info.kv == "paged" else None


def find_device_blocks(executor: Executor, kind: str = "exact") -> DeviceKVBlocks | None:
    """Return the executor's KV blocks if they are in device memory, else None."""
    blocks = find_kv_blocks(executor, kind)
    return cast(DeviceKVBlocks, blocks) if hasattr(blocks, "allocate_host") else None


def find_async(executor: Executor) -> AsyncExecutor | None:
    """Return the executor if it is asynchronous, else None."""
    return cast(AsyncExecutor, executor) if getattr(executor, "is_async", False) else None


@runtime_checkable
class SupportsReconnect(Protocol):
    """An executor whose device can be unavailable for a while. A device that is available again has lost all of its
    state.

    While the device is unavailable, the engine computes nothing and keeps all requests. `on_change` is called, from any
    thread, when the device is lost and when it is available again.
    """

    on_change: Callable[[], None]

    @property
    def is_up(self) -> bool:
        """Return whether the device is reachable, as far as the executor knows. Safe from any thread."""


@runtime_checkable
class Embedder(Protocol):
    """An executor that can also return the vector of a text, if its `info.embedding_size` is not 0."""

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Return the vectors, as 32-bit floats, for the given logits rows of the last forward pass. The logits rows
        belong to step `step`, and tokens were already sampled from them. For a model that generates, a vector is the
        hidden state, scaled to length 1."""


class Sampler(Protocol):
    """Samples tokens from logits. `logits` is the backend's array of shape `[R, V]` (rows, vocabulary size).
    `history(row)` returns the tokens before the token that a row samples, and how many of them are the prompt. Element
    i of the result belongs to `batch.rows[i]`."""

    def __call__(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> StepResult: ...


class PendingSample(Protocol):
    """Result of sampling that is not finished."""

    @property
    def tokens(self) -> Any:
        """Return the tokens as an integer tensor [rows] on the device, in the order of the batch. A row without a
        sampled token has a negative number. Return None if the host must wait for the tokens."""

    def take(self) -> StepResult:
        """Wait for the tokens and return them. Called once."""


@runtime_checkable
class AsyncSampler(Sampler, Protocol):
    """A sampler that can run without waiting for its result. A call of the sampler itself is the same as `draw`
    followed by `take`."""

    def draw(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> PendingSample:
        """Start sampling for `batch`. After `draw` returns, work that is started later on the device may overwrite
        `logits`."""


class HistoryLookup(Protocol):
    def __call__(self, row: SampleRow) -> tuple[Sequence[int], int]: ...
