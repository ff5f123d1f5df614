"""One step as plain data: the tokens to compute, the sampling rows, and the results.

Only values of this module pass between the scheduler and an `Executor`. The values can be printed, created by hand in a
test, and sent over a network. The values contain no tensors and no references to engine objects. Every message has its
step number, so that outdated messages can be recognized and dropped.

The executor keeps a copy, or *mirror*, of each sequence: its tokens, which penalties need, and its block table. A row
of a plan sends only the changes of the executor's copy. Plans must not be changed. Plans are not frozen, because each
step creates hundreds of rows and frozen objects are slower. A plan is applied in this order: forks, freed, copies,
state copies, rows.
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
    """A fork: `child` starts as a copy of `parent` in the executor, truncated to `num_tokens` tokens and `num_blocks`
    blocks."""

    parent: int
    child: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy KV block `source` to block `target`, in all layers, before any row of this plan writes."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy the recurrent state in slot `source` to slot `target`, in all layers. All sources of a plan are read before
    any target is written, and before any row of the plan writes."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateSave:
    """Copy a row's recurrent state after the first `position` tokens of the sequence to slot `slot`."""

    position: int
    slot: int


def placeholder_for_row(row: int) -> int:
    """Return the placeholder in a plan for the token that row `row` of the last batch samples. Applied to a
    placeholder, the function returns the row."""
    return -1 - row


@dataclass(slots=True)
class PlanRow:
    """Compute `num_scheduled` tokens of one sequence, from position `start` on.

    The executor's copy first keeps `num_kept` tokens and appends `new_tokens`. The executor's copy then keeps
    `num_kept_blocks` blocks and appends `new_blocks`. The KV before `start` is valid. The KV from `start` on is
    rewritten, so a backend that keeps KV by sequence truncates it to `start`. The last `num_logits` of the computed
    positions give logits rows. The logits rows of a step are numbered in the order of the plan's rows.

    The last of the new tokens may be draft tokens, which the sequence does not have yet. Each draft token is computed
    like any other token. The next row drops the draft tokens that were not sampled. `runs` are the images among the new
    tokens. If tokens are dropped, the images among them are dropped too. A new token below 0 is a placeholder
    (`placeholder_for_row`), which only asynchronous executors get.

    In a model with recurrent layers, slot `state` has the sequence's state. When the row begins, the slot `state` has
    the state after `start` tokens (empty if `start` is 0). When the row ends, the slot `state` has the state after all
    tokens of the row, including draft tokens. `saves` are copies of the state to make while the row is computed, by
    position. For models without recurrent layers, `state` is -1.

    `vectors` are the control vectors of the computed tokens. `probes` are pairs of a vector's key and a layer (None:
    the last layer). The hidden states at positions with logits are projected on the vectors in `probes`.
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
    """The rows of one forward pass. Rows are in packing order, with decodes and prefill chunks mixed."""

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
    """Sample one token from logits row `logits_index`. Several sampling rows may use the same logits row (a fork).

    `seq_id` names the executor's copy (mirror) whose tokens the penalties use. For a new fork, `seq_id` names the
    executor's copy of the parent. `mask` is a bit row: bit i of the little-endian bit string means that token i is
    allowed (`ceil(V / 32)` 32-bit words). `bias` has (token, addend) pairs, which are added to `sampling.logit_bias`;
    -inf forbids a token. The random number depends only on (`key`, `draw`). `mu` is the state of Mirostat after the
    last sampled token of the sequence; None before the first one. The last `num_ahead` tokens of the executor's copy
    are draft tokens after the position of this row, which ignores them. A traced row reports its distribution, with the
    `num_traced` most probable tokens.
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
        """Return the `tokens` of the executor's copy that come before the position of this row."""
        return tokens[: len(tokens) - self.num_ahead] if self.num_ahead else tokens


@dataclass(frozen=True, slots=True)
class ScoreRun:
    """Report the log-probabilities of known `tokens`. Logits row `logits_start + i` predicts token i.

    With each token, `num_top` alternatives are reported (0: none).
    """

    seq_id: int
    logits_start: int
    tokens: tuple[int, ...]
    num_top: int = 0


@dataclass(slots=True)
class SampleBatch:
    """All tokens to sample and all scores to compute from the logits of step `step`. The logits of `unnamed` ids are
    ignored."""

    step: int
    rows: list[SampleRow] = field(default_factory=list)
    scores: list[ScoreRun] = field(default_factory=list)
    unnamed: PaddedVocab = NONE_UNNAMED


@dataclass(slots=True)
class StepResult:
    """The results of step `step`, in the order of the `SampleBatch`.

    `tokens[i]` is the token of `rows[i]`; -1 means that the mask and the bias left no token. `logprobs[i]` is None
    unless the sampling parameters of the row ask for log-probabilities. `scores[j]` is the result for element j of the
    batch's `scores`. `mus[i]` is the state of Mirostat after sampling `rows[i]`; `mus` is empty if no row uses
    Mirostat. `draws[i]` is the distribution of a traced row, possibly computed only when it is read; `draws` is empty
    if no row is traced. `probes[i]` are the projections at the position that `rows[i]` samples from; `probes` is empty
    if no row has probes.
    """

    step: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob | None] = field(default_factory=list)
    scores: list[list[Logprob]] = field(default_factory=list)
    mus: list[float] = field(default_factory=list)
    draws: Sequence[Draw | None] = field(default_factory=list)
    probes: list[tuple[float, ...]] = field(default_factory=list)
