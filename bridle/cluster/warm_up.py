"""The largest step that can come, run before the first request: memory that is missing shows now, and speed is known.

Works with any executor; what it leaves behind is forgotten.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bridle.engine.interfaces import Executor
from bridle.engine.plan import PlanRow, SampleBatch, SampleRow, StepPlan
from bridle.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """`seconds` of a step with `num_tokens` prompt tokens, what is made once included, and `decode_seconds` of one with
    a token for each of `num_seqs` sequences."""

    num_tokens: int
    seconds: float
    num_seqs: int
    decode_seconds: float


def warm_up(executor: Executor, num_tokens: int = 0, num_seqs: int = 0) -> WarmUp:
    """Run a prefill of `num_tokens` and a decode of `num_seqs` (0: as many as one step takes). Raises what the
    executor raises, such as `OutOfBlocks`. No sequence may be alive."""
    info = executor.info
    num_seqs = max(min(num_seqs or info.max_num_seqs, info.num_blocks), 1)
    limit = min(info.num_blocks // num_seqs * info.block_size, info.max_model_len - 1)  # of one sequence
    num_tokens = max(min(num_tokens or info.max_num_batched_tokens, num_seqs * limit), 1)
    try:
        seconds = _run(executor, 1, _rows(_split(num_tokens, num_seqs, limit), info.block_size))
        executor.reset()
        decode_seconds = _run(executor, 2, _rows([1] * num_seqs, info.block_size))
    finally:
        executor.reset()
    return WarmUp(num_tokens, seconds, num_seqs, decode_seconds)


def _split(num_tokens: int, num_seqs: int, limit: int) -> list[int]:
    """As few prompts as hold that many tokens."""
    lengths: list[int] = []
    while num_tokens > 0 and len(lengths) < num_seqs:
        lengths.append(min(num_tokens, limit))
        num_tokens -= lengths[-1]
    return lengths


def _rows(lengths: list[int], block_size: int) -> list[PlanRow]:
    rows, block = [], 0
    for seq_id, length in enumerate(lengths):
        num_blocks = -(-length // block_size)
        blocks = tuple(range(block, block + num_blocks))
        rows.append(PlanRow(seq_id, 0, length, new_tokens=(0,) * length, new_blocks=blocks, num_prompt=length))
        block += num_blocks
    return rows


def _run(executor: Executor, step: int, rows: list[PlanRow]) -> float:
    began = time.perf_counter()
    executor.forward(StepPlan(step, rows))
    executor.sample(SampleBatch(step, [SampleRow(row.seq_id, i, _GREEDY) for i, row in enumerate(rows)]))
    return time.perf_counter() - began
