"""Replays a recorded run without a model: the recorded tokens are sampled again as long as the requests are the same.

A traced sample has the most probable tokens of its distribution, before and after the mask. With the recorded tokens, a
run can be replayed if its controller behaves the same. The engine, the controllers and the constraints are real, and
only the logits are missing. Any difference between the runs is reported as a `ReplayDivergence`. After a difference,
the run continues only if the record determines the next token.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepPlan, StepResult
from bridle.engine.sequence import copy_seed, fork_key, root_key
from bridle.model.input_batch import InputBatch
from bridle.outputs import Logprob
from bridle.sampling import DEFAULT_SAMPLING
from bridle.traces import (
    NUM_CANDIDATES,
    Draw,
    ForkRecord,
    PromptRecord,
    Record,
    ReplacedRecord,
    RewindRecord,
    TokenRecord,
    Trace,
)

_NOTHING = -1
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class ReplayDivergence:
    """The first difference of a run from the recorded run. The difference is another `mask`, or a request for data that
    the record does not have (`unknown`). `num_tokens` is the number of tokens before the differing sample, including
    the prompt."""

    kind: Literal["mask", "unknown"]
    num_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One sampled token of the record, with a digest of the tokens before it."""

    before: bytes
    token: int
    draw: Draw | None
    biases: tuple[tuple[int, float | None], ...] | None = None  # None: the biases were not recorded
    num_biases: int = 0


class RecordedExecutor:
    """An `Executor` that samples the tokens recorded in the trace that was passed to `play`. The executor computes
    nothing and applies no adapter."""

    num_bytes = 0

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info
        self.notes: list[ReplayDivergence] = []
        self._mirrors = InputBatch(info.num_blocks, info.block_size, info.max_model_len, info.vocab_size)
        self._draws: dict[tuple[int, int], _Recorded] = {}

    def play(self, trace: Trace) -> None:
        """Replay this trace from now on."""
        self._draws, self.notes = dict(_draws_of(trace)), []

    def forward(self, plan: StepPlan) -> None:
        self._mirrors.apply(plan)

    def sample(self, batch: SampleBatch) -> StepResult:
        found = [self._draw(row) for row in batch.rows]
        tokens = [_NOTHING if draw is None else token for token, draw in found]
        logprobs = [
            None if draw is None else _logprob(row, token, draw)
            for row, (token, draw) in zip(batch.rows, found, strict=True)
        ]
        return StepResult(batch.step, tokens, logprobs, [], [], [draw for _, draw in found])

    def reset(self) -> None:
        self._mirrors.clear()

    def close(self) -> None:
        self.reset()

    # -- one sample --------------------------------------------------------------------------------------

    def _draw(self, row: SampleRow) -> tuple[int, Draw | None]:
        """Return the recorded token and its distribution under the mask of the row. An unknown distribution is left out
        of the result."""
        history = row.history(self._mirrors[row.seq_id].tokens)
        recorded = self._draws.get((row.key, row.draw))
        if recorded is None or recorded.before != _digest(history) or recorded.draw is None:
            why = "nothing was recorded" if recorded is None else "other tokens came before it when it was recorded"
            self._note("unknown", history, f"a draw of which {why}")
            return _NOTHING, None
        if (row.sampling.logprobs or 0) > NUM_CANDIDATES:
            self._note("unknown", history, f"{row.sampling.logprobs} candidates are wanted, {NUM_CANDIDATES} recorded")
            return _NOTHING, None
        mask = _Mask(row, self.info.vocab_size)
        draw, what = recorded.draw, mask.difference(recorded)
        if what is None:
            return recorded.token, draw
        self._note("mask", history, what)
        token = mask.best(draw) if row.sampling.is_greedy else None
        return (
            (_NOTHING, None) if token is None else (token, Draw(draw.before, draw.after, mask.num_allowed, draw.taken))
        )

    def _note(self, kind: Literal["mask", "unknown"], history: Sequence[int], text: str) -> None:
        self.notes.append(ReplayDivergence(kind, len(history), text))


class _Mask:
    """The mask and the biases of a sampling row."""

    def __init__(self, row: SampleRow, vocab_size: int) -> None:
        bits = None if row.mask is None else int.from_bytes(row.mask, "little") & ((1 << vocab_size) - 1)
        self.biases = dict[int, float]()
        for token, addend in row.bias:
            self.biases[token] = self.biases.get(token, 0.0) + addend
        self._asked = row.sampling.logit_bias
        never = [token for addends in (self.biases, self._asked) for token, add in addends.items() if add == -math.inf]
        if never:
            bits = (1 << vocab_size) - 1 if bits is None else bits
            for token in never:
                bits &= ~(1 << token)
        self._bits = bits
        num_allowed = vocab_size if bits is None else bits.bit_count()
        self.num_allowed = None if num_allowed >= vocab_size else num_allowed
        self._told = tuple((token, None if math.isinf(addend) else addend) for token, addend in row.bias)

    def allows(self, token: int) -> bool:
        return self._bits is None or bool(self._bits >> token & 1)

    def difference(self, recorded: _Recorded) -> str | None:
        """Return a text about the first difference from the recorded mask; None if there is no difference."""
        draw = recorded.draw
        assert draw is not None
        if self.num_allowed != draw.num_allowed:
            return f"{_amount(draw.num_allowed)} tokens were allowed, now {_amount(self.num_allowed)}"
        known = [recorded.token, *(token for token, _ in draw.odds.top)]
        forbidden = next((token for token in known if not self.allows(token)), None)
        if forbidden is not None:
            return f"token {forbidden} was allowed, and is not"
        allowed = next((token for token in _forbidden(draw) if self.allows(token)), None)
        if allowed is not None:
            return f"token {allowed} was not allowed, and is"
        biases = recorded.biases
        if biases is not None and (self._told[: len(biases)], len(self._told)) != (biases, recorded.num_biases):
            return f"{recorded.num_biases} biases were recorded, now there are {len(self._told)}, or others"
        return None

    def best(self, draw: Draw) -> int | None:
        """Return the most probable allowed token if it is among the recorded tokens; else None."""
        if self._asked or any(math.isfinite(addend) for addend in self.biases.values()):
            return None
        return next((token for token, _ in draw.before.top if self.allows(token)), None)


def _forbidden(draw: Draw) -> Iterator[int]:
    """Yield tokens that were certainly forbidden, because they were more probable than the least probable recorded
    token. The mask and the biases of a row cannot be told apart, so the sample must have only a mask."""
    if draw.after is None or not draw.after.top:
        return
    left = dict(draw.after.top)
    moved = draw.after.logprob - draw.before.logprob
    own = dict(draw.before.top)
    if any(abs(left[token] - moved - own[token]) > 1e-3 for token in left.keys() & own.keys()):
        return
    least = min(left.values()) - moved
    yield from (token for token, logprob in own.items() if token not in left and logprob > least + 1e-3)


def _amount(num_allowed: int | None) -> str:
    return "all" if num_allowed is None else str(num_allowed)


def _logprob(row: SampleRow, token: int, draw: Draw) -> Logprob | None:
    if row.sampling.logprobs is None:
        return None
    odds = draw.odds if row.sampling.logprobs_mode == "processed" else draw.before
    return Logprob(token, odds.logprob, odds.top[: row.sampling.logprobs], odds.rank)


# -- the record ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Line:
    """One output of the record during its replay."""

    key: int
    tokens: list[int] = field(default_factory=list)
    num_draws: int = 0


def _draws_of(trace: Trace) -> Iterator[tuple[tuple[int, int], _Recorded]]:
    """Yield the recorded samples with their random key and number, by which the engine requests them."""
    lines = {0: _Line(root_key(trace.header.sampling.get("seed") or 0), list(trace.header.prompt))}
    num_forks: dict[int, int] = defaultdict(int)
    last_fork: dict[int, tuple[int, int]] = {}  # step and number of branches, by parent
    num_own = _num_own(trace)
    for record in trace.records:
        if isinstance(record, ForkRecord):
            parent = lines[record.parent]
            step, branch = last_fork.get(record.parent, (-1, 0))
            if step != record.step:
                num_forks[record.parent] += 1
                branch = 0
            last_fork[record.parent] = record.step, branch + 1
            key = fork_key(parent.key, num_forks[record.parent] - 1, branch + 1)
            if num_own and not record.parent and num_forks[0] == 1:  # the request's own outputs
                copy, own = divmod(branch + 1, num_own)
                root = root_key(copy_seed(trace.header.sampling.get("seed") or 0, copy))
                key = fork_key(root, 0, own) if own else root
            lines[record.output] = _Line(key, list(parent.tokens), parent.num_draws)
            continue
        line = lines.get(record.output)
        if line is not None:
            drawn = _follow(line, record)
            if drawn is not None:
                yield (line.key, line.num_draws - 1), drawn


def _num_own(trace: Trace) -> int:
    """Return the number of branches that each of the `n` outputs has in its first fork; 0 if there is one output."""
    forks = [record.step for record in trace.records if isinstance(record, ForkRecord) and not record.parent]
    num_outputs = trace.header.sampling.get("n") or 1
    return (forks.count(forks[0]) + 1) // num_outputs if forks and num_outputs > 1 else 0


def _follow(line: _Line, record: Record) -> _Recorded | None:
    """Apply a trace record to an output. Returns the sample if the record is a sample, else None."""
    match record:
        case PromptRecord() if not line.num_draws:
            line.tokens = list(record.tokens)
        case RewindRecord():
            del line.tokens[max(len(line.tokens) - record.num_tokens - record.num_prompt, 0) :]
        case TokenRecord(forced=True):
            line.tokens.append(record.token)
        case TokenRecord():
            drawn = _Recorded(_digest(line.tokens), record.token, record.draw, record.biases, record.num_biases)
            line.tokens.append(record.token)
            line.num_draws += 1
            return drawn
        case ReplacedRecord():
            line.num_draws += 1
            return _Recorded(_digest(line.tokens), record.token, record.draw)
    return None


def _digest(tokens: Sequence[int]) -> bytes:
    return blake2b(array("q", tokens).tobytes(), digest_size=16).digest()


def info_of(traces: Sequence[Trace], vocab_size: int, eos_token_ids: Sequence[int]) -> ExecutorInfo:
    """Return the info of the recorded model, for an engine without weights. The info has room for all given traces at
    once."""
    longest = max([_room(trace) for trace in traces], default=1)
    num_blocks = max([_num_blocks(trace) for trace in traces], default=1) + longest // _BLOCK_SIZE + 2
    return ExecutorInfo(
        model="recorded",
        vocab_size=vocab_size,
        max_model_len=longest,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        eos_token_ids=tuple(eos_token_ids),
    )


def _room(trace: Trace) -> int:
    """Return the maximum length of a sequence in the recorded model. If the trace does not have this length, return the
    maximum length that the request could reach."""
    told = trace.header.engine.get("max_model_len")
    most = trace.header.sampling.get("max_tokens", DEFAULT_SAMPLING.max_tokens)
    least = prompt_length(trace) + max(most or 0, _num_tokens(trace) + 1)
    return told if isinstance(told, int) and told >= least else least


def _num_blocks(trace: Trace) -> int:
    """Return the number of blocks for all outputs at once, if they share no blocks."""
    num_outputs = len({record.output for record in trace.records})
    return num_outputs * ((prompt_length(trace) + _num_tokens(trace)) // _BLOCK_SIZE + 2)


def prompt_length(trace: Trace) -> int:
    """Return the length that the prompt had when it was computed. A controller may have rewritten the prompt."""
    return max([len(record.tokens) for record in trace.records if isinstance(record, PromptRecord)], default=0) or len(
        trace.header.prompt
    )


def _num_tokens(trace: Trace) -> int:
    return sum(isinstance(record, TokenRecord) for record in trace.records)
