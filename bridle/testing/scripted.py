"""An executor without a model, to test the engine's properties, for tests of users, and to measure the engine alone.

`ScriptedExecutor` applies each `StepPlan` exactly to a fake KV cache, and computes its logits from the KV that it reads
back. So the executor finds a wrong block, a missing copy or an outdated prefix. The executor also checks every plan
against the rules for executors, and raises `InternalError` at once. The executor needs neither torch nor weights, and
does not handle text.

    executor = ScriptedExecutor(vocab_size=32, num_blocks=64, block_size=4)
    engine = Engine(executor)
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bridle.engine.control.decision import mask_words
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.sampling.padded_vocab import PaddedVocab
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, ScoreRun, StepPlan, StepResult
from bridle.errors import BridleError, InternalError, ShardUnavailable
from bridle.kv_store.records import Buffer, Snapshot
from bridle.outputs import Logprob
from bridle.testing.clock import Clock
from bridle.testing.device import PlayedDevice
from bridle.testing.kv import Contents, FakeStates, PagedKV, SequenceKV
from bridle.testing.logits import Logits, NextToken, ScriptedModel
from bridle.testing.mirror import Mirror, Mirrors, check_plan, check_writes, require
from bridle.testing.sampler import draw_of, logprob_of, next_mu, sample_row
from bridle.traces import Draw


@dataclass(frozen=True, slots=True)
class _LogitsRow:
    """One row of the last forward pass: its sequence, its position, and its logits."""

    seq_id: int
    position: int
    logits: Logits  # [V]


class ScriptedBlocks:
    """The blocks and states of the fake KV cache, in the form that a store uses. `identity` identifies the model that
    computed the KV."""

    def __init__(self, paged: PagedKV, states: FakeStates, identity: str) -> None:
        self._paged, self._states, self._identity = paged, states, identity
        self.block_bytes = 16 * paged.block_size
        self.state_bytes = 8 * bool(states)

    def identity(self) -> str:
        return self._identity

    def read_block(self, block: int) -> Buffer | Snapshot:
        return self._paged.read_block(block)

    def write_block(self, block: int, data: memoryview) -> None:
        self._paged.write_block(block, data)

    def read_state(self, slot: int) -> Buffer | Snapshot:
        return self._states.read(slot)

    def write_state(self, slot: int, data: memoryview) -> None:
        self._states.write(slot, data)


class ScriptedSequences:
    """The KV of whole sequences of the fake cache, in the form that a store uses. The KV of a sequence can be
    truncated, unless `is_cuttable` is set to False."""

    def __init__(self, mirrors: Mirrors, cells: SequenceKV, identity: str) -> None:
        self._mirrors, self._cells, self._identity = mirrors, cells, identity
        self.is_cuttable = True

    def identity(self) -> str:
        return self._identity

    def size_of(self, seq_id: int, num_tokens: int) -> int:
        length = self._cells.length(seq_id)
        fits = length >= num_tokens if self.is_cuttable else length == num_tokens
        return 16 * length if seq_id in self._mirrors and fits else 0

    def read(self, seq_id: int) -> bytes:
        tokens, digests = self._cells.read(seq_id, self._cells.length(seq_id))
        return tokens.tobytes() + digests.tobytes()

    def free(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._mirrors.free(seq_id)
            self._cells.free(seq_id)

    def adopt(self, seq_id: int, adapter: str | None, tokens: Sequence[int], state: memoryview) -> bool:
        held, digests = np.frombuffer(state, np.int64).reshape(2, -1)
        require(self.is_cuttable or len(held) == len(tokens), "KV that cannot be cut is cut")
        if seq_id in self._mirrors or self._cells.num_cells + len(tokens) > self._cells.capacity:
            return False
        self._mirrors.adopt(seq_id, adapter, tokens)
        self._cells.append(seq_id, held[: len(tokens)].tolist(), digests[: len(tokens)].view(np.uint64).tolist())
        return True


class ScriptedExecutor:
    """A scripted `Executor`.

    `kv` is the layout of the KV cache. `next_token(prefix)` replaces the seeded hash. `next_token` returns a token id
    or a row of logits. `faults` maps the number of a call of `forward` (from 0) to the error that this call raises at
    its start. `sample_faults` maps the numbers of calls of `sample` to errors in the same way. `device_time(plan)` is
    the duration of a forward pass in seconds of `clock`. `forward` returns at once, and `sample` waits for the
    remaining time. `forward` first calls `on_forward`, in the engine's thread. With `record`, all plans and batches are
    kept in `plans` and `batches`. `violations` has the operations that were refused. With an `embedding_size`, the
    executor also gives embeddings.
    """

    def __init__(
        self,
        vocab_size: int = 32,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        kv: Literal["paged", "sequences"] = "paged",
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        next_token: NextToken | None = None,
        spread: int = 16,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 256,
        faults: Mapping[int, BridleError] | None = None,
        sample_faults: Mapping[int, BridleError] | None = None,
        clock: Clock | None = None,
        device_time: Callable[[StepPlan], float] | None = None,
        on_forward: Callable[[StepPlan], None] | None = None,
        record: bool = False,
        embedding_size: int = 0,
        num_states: int = 0,
    ) -> None:
        self.info = ExecutorInfo(
            model="scripted",
            vocab_size=vocab_size,
            max_model_len=max_model_len or num_blocks * block_size,
            num_blocks=num_blocks,
            block_size=block_size,
            kv=kv,
            eos_token_ids=tuple(eos_token_ids),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            embedding_size=embedding_size,
            block_bytes=block_size,
            num_states=num_states,
            state_bytes=int(num_states > 0),
        )
        self.model = ScriptedModel(vocab_size, seed, next_token, spread)
        self.plans: list[StepPlan] = []
        self.batches: list[SampleBatch] = []
        self.violations: list[InternalError] = []
        self.num_computed_tokens = 0
        self.is_closed = False
        self.device = PlayedDevice(faults, sample_faults, clock, device_time)
        self._on_forward, self._record = on_forward, record
        self._mirrors = Mirrors(self.info, self.model)
        self._paged = PagedKV(num_blocks, block_size)
        self._by_sequence = SequenceKV(num_blocks * block_size)
        self._states = FakeStates(num_states)
        identity = f"scripted {vocab_size} {block_size} {seed}"
        self.kv_blocks = self._make_blocks(identity)
        self.sequence_states = ScriptedSequences(self._mirrors, self._by_sequence, identity)
        self._rows: list[_LogitsRow] = []
        self._step = -1
        self._is_sampled = True

    def _make_blocks(self, identity: str) -> ScriptedBlocks:
        return ScriptedBlocks(self._paged, self._states, identity)

    @property
    def num_forwards(self) -> int:
        """Return the number of calls of `forward` so far."""
        return self.device.num_forwards

    @property
    def num_mirrors(self) -> int:
        """Return the number of sequences that the executor has."""
        return len(self._mirrors)

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan and compute its rows. Raises `InternalError` if the plan breaks a rule for executors."""
        self._notice(plan)
        self.compute(plan)
        self.device.run(plan)

    def compute(self, plan: StepPlan) -> None:
        """Compute a plan on the simulated device."""
        with Recorded(self.violations):
            require(not self.is_closed, f"step {plan.step} on a closed executor")
            self._run(plan)

    def _notice(self, plan: StepPlan) -> None:
        if self._on_forward is not None:
            self._on_forward(plan)
        self._fail(self.device.begin_forward())
        if self._record:
            self.plans.append(plan)

    def sample(self, batch: SampleBatch) -> StepResult:
        """Sample and score from the logits of the last forward pass. Raises `InternalError` if the batch does not fit
        the logits of the last forward pass."""
        self._fail(self.device.begin_sample())
        return self.read(batch)

    def read(self, batch: SampleBatch) -> StepResult:
        """Sample a batch on the simulated device."""
        if self._record:
            self.batches.append(batch)
        with Recorded(self.violations):
            require(batch.step == self._step, f"samples step {batch.step}; the last forward was {self._step}")
            require(not self._is_sampled, f"step {batch.step} is sampled twice")
            self._is_sampled = True
            if batch.unnamed:
                self._rows = [_without(row, batch.unnamed) for row in self._rows]
            drawn = [self._draw(row) for row in batch.rows]
            scores = [self._score(run) for run in batch.scores]
            tokens = [token for token, _ in drawn]
            mus = list(map(self._next_mu, batch.rows, tokens))
            draws = [self._trace(row, token) for row, token in zip(batch.rows, tokens, strict=True)]
        logprobs = [logprob for _, logprob in drawn]
        return StepResult(batch.step, tokens, logprobs, scores, mus if any(mus) else [], draws if any(draws) else [])

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Return a vector of length 1 for each row. The vector is a hash of everything that was read from the KV cache
        for the row."""
        with Recorded(self.violations):
            require(step == self._step, f"embeds step {step}; the last forward was {self._step}")
            require(self._is_sampled, f"step {step} is to be embedded before it is sampled")
            for index in logits_rows:
                require(0 <= index < len(self._rows), f"logits row {index} of {len(self._rows)}")
            return [embedding_of(self._rows[index].logits, self.info.embedding_size) for index in logits_rows]

    def reset(self) -> None:
        """Forget all sequences and all KV."""
        self._mirrors.clear()
        self._paged.clear()
        self._by_sequence.clear()
        self._states.clear()
        self._rows = []

    def close(self) -> None:
        """Close the executor. A later call of `forward` is a violation. Idempotent."""
        self.is_closed = True
        self.reset()

    # -- forward -------------------------------------------------------------------------------------------

    def _fail(self, fault: BridleError | None) -> None:
        if fault is None:
            return
        if isinstance(fault, ShardUnavailable):
            self.reset()
        raise fault

    def _run(self, plan: StepPlan) -> None:
        check_plan(plan, self._step, self.info)
        self._step, self._is_sampled, self._rows = plan.step, False, []
        for fork in plan.forks:
            self._mirrors.fork(fork)
            self._by_sequence.fork(fork.parent, fork.child, fork.num_tokens)
        for seq_id in plan.freed:
            self._mirrors.free(seq_id)
            self._by_sequence.free(seq_id)
        mirrors = [self._mirrors.apply(row) for row in plan.rows]
        if self.info.kv == "paged":
            check_writes(plan, self._mirrors, self.info.block_size)
            self._paged.copy(plan.copies)
        else:
            self._truncate(plan.rows)
        self._states.copy(plan.state_copies)
        for row, mirror in zip(plan.rows, mirrors, strict=True):
            self._write(row, mirror)
            if self.info.num_states:
                self._states.run(row, mirror.digests)
        for row, mirror in zip(plan.rows, mirrors, strict=True):
            self._read(row, mirror)

    def _truncate(self, rows: Sequence[PlanRow]) -> None:
        for row in rows:
            valid = self._by_sequence.length(row.seq_id)
            require(row.start <= valid, f"sequence {row.seq_id} starts at {row.start}, but has {valid} KV cells")
            self._by_sequence.truncate(row.seq_id, row.start)

    def _write(self, row: PlanRow, mirror: Mirror) -> None:
        end = row.start + row.num_scheduled
        tokens, digests = mirror.tokens[row.start : end], mirror.digests[row.start : end]
        if self.info.kv == "paged":
            self._paged.write(mirror.blocks, row.start, tokens, digests)
        else:
            self._by_sequence.append(row.seq_id, tokens, digests)
        self.num_computed_tokens += row.num_scheduled

    def _read(self, row: PlanRow, mirror: Mirror) -> None:
        end = row.start + row.num_scheduled
        if self.info.kv == "paged":
            contents = self._paged.read(mirror.blocks, end)
        else:
            contents = self._by_sequence.read(row.seq_id, end)
        self._compare(row, mirror, contents)
        if row.num_logits:
            logits = self.model.rows(contents.tokens, contents.digests, row.num_logits)
            first = end - row.num_logits
            self._rows += [_LogitsRow(row.seq_id, first + i, one) for i, one in enumerate(logits)]

    def _compare(self, row: PlanRow, mirror: Mirror, contents: Contents) -> None:
        found = contents.digests.tolist()
        if found == mirror.digests[: len(found)]:
            return
        position = next(i for i, digest in enumerate(found) if digest != mirror.digests[i])
        raise InternalError(
            f"step {self._step}: sequence {row.seq_id} (start {row.start}, {row.num_scheduled} scheduled) "
            f"reads wrong KV at position {position}: it holds token {contents.tokens[position]}, expected "
            f"{mirror.tokens[position]} after {mirror.tokens[:position]}"
        )

    # -- sample --------------------------------------------------------------------------------------------

    def _logits_of(self, index: int, seq_id: int) -> _LogitsRow:
        require(0 <= index < len(self._rows), f"logits row {index} of {len(self._rows)}")
        row = self._rows[index]
        require(row.seq_id == seq_id, f"logits row {index} belongs to sequence {row.seq_id}, not {seq_id}")
        return row

    def _draw(self, row: SampleRow) -> tuple[int, Logprob | None]:
        source, mirror = self._logits_of(row.logits_index, row.seq_id), self._mirrors[row.seq_id]
        require(
            source.position == len(mirror.tokens) - 1 - row.num_ahead,
            f"sequence {row.seq_id} samples after position {source.position} of {len(mirror.tokens)} tokens",
        )
        size = 4 * mask_words(self.info.vocab_size)
        require(row.mask is None or len(row.mask) == size, f"a mask has {len(row.mask or b'')} bytes, not {size}")
        require(row.draw >= 0, f"draw number {row.draw}")
        for token, _ in row.bias:
            require(0 <= token < self.info.vocab_size, f"bias of token {token}, which is not in the vocabulary")
        return sample_row(source.logits, row, row.history(mirror.tokens), mirror.num_prompt)

    def _trace(self, row: SampleRow, token: int) -> Draw | None:
        if token < 0 or not row.num_traced:
            return None
        return draw_of(self._logits_of(row.logits_index, row.seq_id).logits, row, token)

    def _next_mu(self, row: SampleRow, token: int) -> float:
        if token < 0 or not row.sampling.has_mirostat:
            return 0.0
        mirror = self._mirrors[row.seq_id]
        logits = self._logits_of(row.logits_index, row.seq_id).logits
        return next_mu(logits, row, mirror.tokens, mirror.num_prompt, token)

    def _score(self, run: ScoreRun) -> list[Logprob]:
        mirror, scores = self._mirrors[run.seq_id], []
        for offset, token in enumerate(run.tokens):
            source = self._logits_of(run.logits_start + offset, run.seq_id)
            following = mirror.tokens[source.position + 1 : source.position + 2]
            require(
                len(run.tokens) == 1 or following in ([], [token]),  # a single one may be one of several options
                f"sequence {run.seq_id} scores token {token} where {following} follows",
            )
            scores.append(logprob_of(source.logits, token, run.num_top))
        return scores


def _without(row: _LogitsRow, unnamed: PaddedVocab) -> _LogitsRow:
    """Return the row of logits with the ids in `unnamed` forbidden."""
    logits = row.logits.copy()
    logits[list(unnamed)] = -math.inf
    return replace(row, logits=logits)


def embedding_of(logits: Logits, size: int) -> array[float]:
    """Return a vector of length 1 that is a hash of a row of logits."""
    values = [byte + 1 for byte in hashlib.shake_128(logits.tobytes()).digest(size)]
    length = math.hypot(*values)
    return array("f", [value / length for value in values])


class Recorded:
    """Records an `InternalError` before it is passed on, in case the engine catches it."""

    def __init__(self, violations: list[InternalError]) -> None:
        self._violations = violations

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InternalError):
            self._violations.append(error)
