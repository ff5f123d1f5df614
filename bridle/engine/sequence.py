"""A list of tokens with KV, which is the unit of scheduling.

A sequence is its tokens and the counter `num_computed`. KV exists for `tokens[:num_computed]`; all later tokens must go
through the model. The same state covers prompts, chunked prompts, decoding and forced tokens. The same state also
covers continuing after a preemption or a rollback. This module uses no batches, budgets or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from bridle.engine.control.vector_scales import Probes, VectorScales
from bridle.engine.multimodal.multimodal_inputs import Runs, before
from bridle.engine.request import Request
from bridle.engine.scheduling.step_plan import PlanRow, placeholder_for_row
from bridle.engine.sequence_state import (
    ControlState,
    DraftState,
    KvState,
    OutputState,
    QueueState,
    SamplerState,
    SequenceStatus,
    TraceState,
)
from bridle.outputs import FinishReason, Usage
from bridle.sampling import SamplingParams

_MASK64 = (1 << 64) - 1
#: Keeps the random keys of checks apart from those of forks and options.
_CHECKS = 1 << 41


def mix64(value: int) -> int:
    """Return a bijective scramble of a 64-bit number (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def root_key(seed: int) -> int:
    """Return the random key of the first sequence of a request."""
    return mix64(seed & _MASK64)


def fork_key(key: int, ordinal: int, branch: int) -> int:
    """Return the random key of branch `branch` (from 1) when a sequence forks for the `ordinal`-th time (from 0).

    Branch 0 keeps the parent's key. A sampled token depends only on the seed, the sequence's path of forks, and the
    number of tokens sampled so far.
    """
    return mix64(mix64(key) + ((ordinal << 16) | branch))  # not `key ^ mix64(...)`: seeds are small numbers too


def copy_seed(seed: int, copy: int) -> int:
    """Return the seed of output `copy` of a request with `n` outputs. A request that has this seed and only one output
    gives the same output. The seed has 53 bits, so every JSON reader reads it exactly."""
    return mix64(mix64(root_key(seed)) + copy) >> 11 if copy else seed


def check_number(key: int, number: int) -> float:
    """Return the random number, from 0 to 1, for check `number` of a sequence with aligned sampling."""
    return fork_key(key, _CHECKS + number, 0) / (1 << 64)


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of a request: its tokens, and one part of state for each component that works on it. Only the owner of
    a state part writes it. Only the methods of this class change tokens."""

    id: int
    request: Request
    index: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    max_len: int  # maximum length in tokens, prompt included
    key: int
    queue: QueueState
    stop_ids: frozenset[int] = frozenset()
    runs: Runs = ()  # images among the tokens
    vectors: VectorScales | None = None  # None: the sequence uses no control vector
    probes: Probes = ()
    allowed: bytes | None = None  # mask for all of its samples, in addition to the controller's masks
    kv: KvState = field(default_factory=KvState)
    control: ControlState = field(default_factory=ControlState)
    draws: SamplerState = field(default_factory=SamplerState)
    drafts: DraftState = field(default_factory=DraftState)
    output: OutputState = field(default_factory=OutputState)
    trace: TraceState | None = None  # None: not requested
    is_choosing: bool = False  # waits until its options are scored
    is_probe: bool = False  # only scores options of another sequence; not an output
    asks_scores: bool = field(init=False)  # whether log-probabilities of known tokens are requested

    def __post_init__(self) -> None:
        self.set_sampling(self.sampling)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        return self.queue.status is SequenceStatus.FINISHED

    @property
    def is_over(self) -> bool:
        """Return whether the output gets no further tokens, even if its client still waits for log-probabilities."""
        return self.is_finished or self.output.ending is not None

    @property
    def is_controlled(self) -> bool:
        return self.control.pool is not None

    @property
    def is_traced(self) -> bool:
        """Return whether the distributions of the sampled tokens are recorded."""
        return self.trace is not None or self.output.meter is not None

    @property
    def is_held(self) -> bool:
        """Return whether the sequence cannot be computed because of its controller or a choice in progress."""
        control = self.control
        return control.missed_deadline or control.is_suspended or self.is_choosing

    @property
    def is_ready(self) -> bool:
        """Return whether the sequence can be computed: it has tokens to compute, and its controller, adapter, media and
        stored KV are ready."""
        control, queue = self.control, self.queue
        return not (
            control.missed_deadline
            or control.is_suspended
            or self.is_choosing
            or queue.adapter_not_scheduled
            or queue.awaits_media
            or queue.awaits_kv
        )

    @property
    def target(self) -> int:
        """Return how many tokens must go through the model. To sample another token, all tokens must go through the
        model; if only log-probabilities are requested, all except the last."""
        return len(self.tokens) - (self.output.ending is not None)

    @property
    def num_to_score(self) -> int:
        """Return how many of the first tokens have requested log-probabilities."""
        if self.sampling.scores_output:
            return len(self.tokens)
        return self.num_prompt if self.sampling.prompt_logprobs is not None else 0

    @property
    def wants_scores(self) -> bool:
        """Return whether a requested log-probability is still unknown."""
        return self.asks_scores and self.output.num_scored < self.num_to_score

    @property
    def max_reusable(self) -> int:
        """Return how many of the first tokens may come from the prefix cache. Cached positions give no logits. So the
        last token, and every token that predicts a token with a requested log-probability, must be computed."""
        limit = len(self.tokens) - 1
        if self.wants_scores:
            limit = min(limit, self.output.num_scored - 1)
        return max(limit, 0)

    def set_sampling(self, sampling: SamplingParams) -> None:
        """Use the given sampling parameters from now on."""
        self.sampling = sampling
        self.asks_scores = sampling.scores_output or sampling.prompt_logprobs is not None

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens. The caller must release the blocks of the removed tokens."""
        del self.tokens[num_tokens:]
        self.runs = before(self.runs, num_tokens)
        if not self.runs:  # `EncoderScheduler` looks only at sequences with images
            self.queue.awaits_media = False
        if self.vectors is not None:
            self.vectors = self.vectors.before(num_tokens)
        self.num_prompt = min(self.num_prompt, num_tokens)
        self.kv.num_mirrored_tokens = min(self.kv.num_mirrored_tokens, num_tokens)
        self.output.num_scored = min(self.output.num_scored, num_tokens)
        self.control.num_kept = min(self.control.num_kept, num_tokens)
        while self.draws.mus and self.draws.mus[-1][0] > num_tokens:
            self.draws.mus.pop()
        self.clamp_computed()

    def set_prompt(self, prompt: tuple[int, ...], max_len: int) -> None:
        """Begin with `prompt`. The sequence may grow to `max_len` tokens."""
        self.tokens, self.num_prompt, self.max_len = list(prompt), len(prompt), max_len
        scored_from = max(self.sampling.prompt_logprobs_start, 1)  # no position predicts the first token
        is_scored = self.sampling.prompt_logprobs is not None
        self.output.num_scored = min(scored_from, len(prompt)) if is_scored else len(prompt)

    def resume_from(self, tokens: tuple[int, ...]) -> None:
        """Begin with `tokens` that another engine sampled for this output; the client already has them."""
        self.tokens += tokens
        self.draws.num_draws = self.output.usage.sampled_tokens = len(tokens)
        self.output.num_scored, self.output.prompt_sent = len(self.tokens), True
        self.control.num_told = self.control.num_kept = len(self.tokens)

    def scale_vectors(self, scales: Mapping[str, float] | None) -> None:
        """Change the scales of control vectors for the next token and all later ones."""
        if self.vectors is not None and scales is not None:
            self.vectors = self.vectors.changed(len(self.tokens), scales)

    def clamp_computed(self) -> None:
        """Lower `num_computed` if necessary, so that at least one token goes through the model before the next token is
        sampled (engine invariant 1)."""
        kv, most = self.kv, self.max_reusable
        if kv.num_computed > most:
            kv.num_computed = most

    # -- while a token is being sampled ----------------------------------------------------------------------

    def append_placeholder(self, row: int) -> None:
        """Append a placeholder for the token that row `row` of the last batch samples. The next step can be planned
        with the placeholder. A requested log-probability comes together with the token."""
        self.tokens.append(placeholder_for_row(row))
        self.output.num_scored += self.sampling.scores_output

    def pop_placeholder(self) -> None:
        """Undo `append_placeholder`. The executor's copy of the sequence may already have the token. The engine counts
        the token only when its value is known."""
        self.tokens.pop()
        self.output.num_scored -= self.sampling.scores_output
        self.kv.num_mirrored_tokens = min(self.kv.num_mirrored_tokens, len(self.tokens))

    def resolve_placeholder(self, position: int, token: int) -> None:
        """Record that the executor's copy of the sequence has `token` at `position`. The token counts as known to the
        executor only if the sequence has the same token there and no token before it was rolled back."""
        kv = self.kv
        if kv.num_mirrored_tokens == position and self.tokens[position : position + 1] == [token]:
            kv.num_mirrored_tokens += 1

    def keep_computed(self, end: int) -> None:
        """Record that tokens up to `end` were computed, as far as they equal those of the executor's copy."""
        self.kv.num_computed = max(self.kv.num_computed, min(end, self.kv.num_mirrored_tokens))
        self.clamp_computed()

    def forget_mirror(self) -> None:
        """Record that a reset of the executor lost this sequence."""
        self.kv.forget()
        self.kv.num_mirrored_tokens = 0

    def plan_row(self, num_tokens: int, drafts: tuple[int, ...] = ()) -> PlanRow:
        """Return the row that computes the next `num_tokens` tokens and then `drafts`. The row has the changes for the
        executor's copy of the sequence, and the positions that need logits. The executor's copy then counts as
        updated."""
        kv, tokens, blocks = self.kv, self.tokens, self.kv.block_table
        start, num_kept, num_kept_blocks = kv.num_computed, kv.num_mirrored_tokens, kv.num_mirrored_blocks
        is_drawn = start + num_tokens == len(tokens)
        num_logits = self._num_scored_logits(num_tokens, is_drawn) if self.wants_scores else int(is_drawn)
        new_blocks = tuple(blocks[num_kept_blocks:]) if len(blocks) > num_kept_blocks else ()
        kv.num_mirrored_tokens, kv.num_mirrored_blocks = len(tokens) + len(drafts), len(blocks)
        row = PlanRow(  # keywords would be slower, and a step has hundreds of rows
            self.id,
            start,
            num_tokens + len(drafts),
            num_logits + len(drafts),
            num_kept,
            (*tokens[num_kept:], *drafts),
            num_kept_blocks,
            new_blocks,
            self.num_prompt,
            self.request.adapter,
            tuple([run for run in self.runs if run.end > num_kept]) if self.runs else (),
        )
        if self.vectors is not None:
            row.vectors = self.vectors.spans(row.start, row.start + row.num_scheduled)
            row.probes = self.probes
        return row

    def _num_scored_logits(self, num_tokens: int, is_drawn: bool) -> int:
        """Return how many of the last computed positions must give logits. Positions that predict a token with a
        requested log-probability give logits. With `is_drawn`, the last position also gives logits, to sample the next
        token."""
        start = self.kv.num_computed
        end = start + num_tokens
        first = max(self.output.num_scored, start + 1) - 1  # position that predicts the first token to score
        return end - first if first < min(end, self.num_to_score - 1) else int(is_drawn)

    # -- options -------------------------------------------------------------------------------------------

    def probe(self, new_id: int, request: Request, sampling: SamplingParams) -> Sequence:
        """Return a copy (probe) that only scores tokens. `begin_probing` adds the tokens once the copy shares the
        blocks. The copy that only scores tokens has no text and no controller."""
        probe = self.fork(new_id, self.index, 0)
        probe.request, probe.trace, probe.is_probe = request, None, True
        probe.set_sampling(sampling)
        probe.control.pool, probe.output.text = None, None
        return probe

    def begin_probing(self, tokens: tuple[int, ...]) -> None:
        """Append tokens, so that the tokens after them can be scored. The last token is added twice, because the last
        token of a sequence is not computed."""
        self.output.num_scored, self.output.ending = len(self.tokens) + 1, (FinishReason.LENGTH, None)
        self.tokens += (*tokens, tokens[-1])
        self.num_prompt = len(self.tokens)

    def note_scored(self, num_tokens: int) -> None:
        """Record that the first `num_tokens` tokens need no log-probability any more."""
        self.output.num_scored = num_tokens

    def count_draw(self) -> None:
        """Count a sampled option."""
        self.draws.num_draws += 1

    def owner_of_block(self, number: int) -> str:
        """Return the user that owns block `number`. The hash of the block must be known."""
        shared = self.request.shared
        return self.request.tenant if shared is None or number >= self.kv.num_shared else shared.owner

    def fork(self, new_id: int, index: int, branch: int, copy: int = 0) -> Sequence:
        """Return a copy of the sequence for branch `branch` of the current fork. The copy belongs to output `copy` of
        the request's `n` outputs. The caller must let the copy share the blocks."""
        kv, control, output = self.kv, self.control, self.output
        root = root_key(copy_seed(self.request.sampling.seed or 0, copy)) if copy else self.key
        key = root if copy and not branch else fork_key(root, self.draws.num_forks, branch)
        return Sequence(
            id=new_id,
            request=self.request,
            index=index,
            tokens=self.tokens.copy(),
            num_prompt=self.num_prompt,
            sampling=self.sampling,
            max_len=self.max_len,
            key=key,
            queue=QueueState(self.queue.level, SequenceStatus.RUNNING),
            stop_ids=self.stop_ids,
            runs=self.runs,
            vectors=self.vectors,
            probes=self.probes,
            allowed=self.allowed,
            kv=kv.fork(),
            control=ControlState(control.pool, control.max_moves, control.num_moves),
            draws=SamplerState(self.draws.num_draws, mus=self.draws.mus.copy(), was_forked=True),
            output=OutputState(
                output.text.copy() if output.text else None,
                meter=output.meter and output.meter.copy(),
                aligned=output.aligned and output.aligned.fork(partial(check_number, key)),
                bans={position: set(tokens) for position, tokens in output.bans.items()},
                num_scored=len(self.tokens),
                prompt_sent=True,
                usage=Usage(
                    prompt_tokens=output.usage.prompt_tokens,
                    cached_tokens=output.usage.cached_tokens,
                    completion_tokens=output.usage.completion_tokens,
                    shared_tokens=kv.num_computed,
                ),
            ),
            trace=None if self.trace is None else self.trace.fork(),
        )
