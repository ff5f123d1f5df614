"""One step as plain data: the tokens to compute, the rows to sample, and the results.

Only these values pass between the scheduler and an `Executor`. They can be printed, built by hand in a test and sent
over a wire; they hold no tensors and no references to engine objects. Every message carries its step number, so that
stale ones can be recognized and dropped.

The executor keeps a copy, or *mirror*, of each sequence: its token list, needed for penalties, and its block table. A
plan row sends only the changes. Plans are not frozen, because hundreds of rows are created in every step and this is
faster, but they must not be changed. A plan is applied in this order: forks, freed, copies, state copies, rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bridle.engine.control.vector_scales import Probes, VectorSpan
from bridle.engine.multimodal.multimodal_inputs import Runs
from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.outputs import Logprob
from bridle.sampling import SamplingParams
from bridle.traces import Draw


@dataclass(frozen=True, slots=True)
class ForkRow:
    """`child` starts as a copy of `parent` in the executor, truncated to `num_tokens` tokens and `num_blocks`
    blocks."""

    parent: int
    child: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy KV block `source` to block `target`, all layers, before any row of this plan writes."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy the recurrent state in slot `source` to slot `target`, all layers. All sources of a plan are read before any
    target is written, and before any row of the plan writes."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateSave:
    """Copy a row's recurrent state after the first `position` tokens of the sequence to slot `slot`."""

    position: int
    slot: int


def placeholder_for_row(row: int) -> int:
    """Return the placeholder in a plan for the token that row `row` of the last batch samples. The function is its own
    inverse."""
    return -1 - row


@dataclass(slots=True)
class PlanRow:
    """Compute `num_scheduled` tokens of one sequence, from position `start` on.

    The executor's copy of the sequence first keeps `num_kept` tokens and appends `new_tokens`, keeps `num_kept_blocks`
    blocks and appends `new_blocks`. KV before `start` is valid. KV at or after `start` is rewritten, so a backend that
    keeps KV by sequence truncates to `start`. The last `num_logits` of the scheduled positions give logits rows. A
    step's logits rows are numbered in row order.

    The last of the new tokens may be draft tokens, which the sequence does not have yet. Each is computed like any
    other token, and the next row drops the draft tokens that were not sampled. `runs` are the images among the new
    tokens; images among tokens that are not kept are dropped with them. A new token below 0 is a placeholder
    (`placeholder_for_row`), for asynchronous executors only.

    A model with recurrent layers keeps a sequence's state in slot `state`. When the row begins, it is the state after
    `start` tokens (nothing for a row that starts at 0). When the row ends, it is the state after all of its tokens,
    drafts included. `saves` are copies to make while the row is computed, by position. `state` is -1 for models without
    recurrent layers.

    `vectors` are the control vectors of the scheduled tokens. `probes` are keys of vectors with layers (None: the last
    layer) along which the hidden states of the positions with logits are read.
    """

    seq_id: int
    start: int
    num_scheduled: int
    num_logits: int = 1
    num_kept: int = 0
    new_tokens: tuple[int, ...] = ()
    num_kept_blocks: int = 0
    new_blocks: tuple[int, ...] = ()
    num_prompt: int = 0
    adapter: str | None = None
    runs: Runs = ()
    state: int = -1
    saves: tuple[StateSave, ...] = ()
    vectors: tuple[VectorSpan, ...] = ()
    probes: Probes = ()

    @property
    def vector_keys(self) -> set[str]:
        """Return the keys of the control vectors that the row names."""
        return {key for span in self.vectors for key, _ in span.mix} | {key for key, _ in self.probes}


@dataclass(slots=True)
class StepPlan:
    """Rows of one forward pass. Rows are in packing order; decodes and prefill chunks are mixed freely."""

    step: int
    rows: list[PlanRow] = field(default_factory=list)
    forks: list[ForkRow] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    state_copies: list[StateCopy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled for row in self.rows)

    @property
    def num_logits(self) -> int:
        return sum(row.num_logits for row in self.rows)


@dataclass(slots=True)
class SampleRow:
    """Sample one token from logits row `logits_index`. Several rows may name the same logits row (a fork).

    `seq_id` names the executor's copy whose tokens the penalties use: the parent's for a new fork. `mask` is a bit
    row (bit i of the little-endian bit string = token i allowed, `ceil(V / 32)` 32-bit words). `bias` holds (token,
    addend) pairs, -inf forbids; it is added to `sampling.logit_bias`. The random number is a pure function of (`key`,
    `draw`). `mu` is the state of Mirostat after the sequence's last sampled token, None before the first. The mirror's
    last `num_ahead` tokens are drafts after the row's position, which this row ignores. A traced row reports its
    distribution with the best `num_traced` tokens.
    """

    seq_id: int
    logits_index: int
    sampling: SamplingParams
    key: int = 0
    draw: int = 0
    mask: bytes | None = None
    bias: tuple[tuple[int, float], ...] = ()
    mu: float | None = None
    num_ahead: int = 0
    num_traced: int = 0

    def history(self, tokens: list[int]) -> list[int]:
        """Return those of the executor's copy's `tokens` that come before the row's position."""
        return tokens[: len(tokens) - self.num_ahead] if self.num_ahead else tokens


@dataclass(frozen=True, slots=True)
class ScoreRun:
    """Report the log-probability of known `tokens`: token i is predicted by logits row `logits_start + i`.

    `num_top` alternatives are reported with each (0 for none).
    """

    seq_id: int
    logits_start: int
    tokens: tuple[int, ...]
    num_top: int = 0


@dataclass(slots=True)
class SampleBatch:
    """All tokens and scores to compute from the logits of step `step`. Logits of `unnamed` ids do not count."""

    step: int
    rows: list[SampleRow] = field(default_factory=list)
    scores: list[ScoreRun] = field(default_factory=list)
    unnamed: PaddedVocab = NONE_UNNAMED


@dataclass(slots=True)
class StepResult:
    """The results of step `step`, in the order of the `SampleBatch`.

    `tokens[i]` answers `rows[i]`; -1 means that nothing could be sampled (the mask and bias left no token).
    `logprobs[i]` is None unless the row's sampling asked for it. `scores[j]` answers `scores[j]` of the batch. `mus[i]`
    is Mirostat's state after sampling `rows[i]`; there are none if no row uses it. `draws[i]` is the distribution of a
    traced row, which may be computed when it is read; there are none if no row is traced. `probes[i]` are the readings
    at the position that `rows[i]` samples from; there are none if no row has probes.
    """

    step: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob | None] = field(default_factory=list)
    scores: list[list[Logprob]] = field(default_factory=list)
    mus: list[float] = field(default_factory=list)
    draws: Sequence[Draw | None] = field(default_factory=list)
    probes: list[tuple[float, ...]] = field(default_factory=list)
