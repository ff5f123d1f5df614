"""Runs the largest possible step before the first request. So missing memory shows at once, and the speed is known.

Warm-up works with any executor, and resets the executor afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from bridle.engine.interfaces import Executor, ExecutorInfo
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, ScoreRun, StepPlan
from bridle.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
#: Sampling parameters with every filter and penalty at once: the largest load of the sampler.
_DEMANDING = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    typical_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=5,
)
#: Number of rows with all filters on a CPU. Samplers on CPUs work on few rows at a time, so more rows need no more
#: memory.
_MAX_DEMANDING_ON_CPU = 8
#: Number of alternatives reported with each scored prompt token.
_NUM_TOP = 5


@dataclass(frozen=True, slots=True)
class LargestStep:
    """Measurement of a step with `num_tokens` prompt tokens and `num_seqs` sequences in total. `seconds` includes work
    that is done only in the first step."""

    num_tokens: int
    num_seqs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Measurements of a warm-up. `seconds` is the time of the largest step, which has `num_tokens` prompt tokens.
    `decode_seconds` is the time of a step with one token for each of `num_seqs` sequences."""

    num_tokens: int
    seconds: float
    num_seqs: int
    decode_seconds: float


def warm_up(executor: Executor, num_tokens: int = 0, num_seqs: int = 0) -> WarmUp:
    """Run the largest step, and then a decoding step of `num_seqs` sequences. Raises the executor's errors, such as
    `OutOfBlocks`. The executor must have no active sequence."""
    largest = run_largest_step(executor, num_tokens, num_seqs)
    num_seqs = _num_seqs(executor.info, num_seqs)
    try:
        decode_seconds = _run(executor, 2, [(0, 1)] * num_seqs)
    finally:
        executor.reset()
    return WarmUp(largest.num_tokens, largest.seconds, num_seqs, decode_seconds)


def run_largest_step(executor: Executor, num_tokens: int = 0, num_seqs: int = 0, context: int = 0) -> LargestStep:
    """Run a step with `num_tokens` prompt tokens, and one token for each of the other sequences. The step has at most
    `num_seqs` sequences (0: as many as one step takes), and only as many as the KV cache has room for. The first prompt
    begins at position `context`, like the last chunk of a long prompt. The KV before that position is read, but its
    content does not matter."""
    info = executor.info
    num_seqs = _num_seqs(info, num_seqs)
    prompts = _prompts(info, num_tokens or info.max_num_batched_tokens, num_seqs, context)
    num_left = info.num_blocks - sum(_num_blocks(chunk, info) for chunk in prompts)
    singles = [(0, 1)] * min(num_seqs - len(prompts), num_left)
    try:
        seconds = _run(executor, 1, [*prompts, *singles])
    finally:
        executor.reset()
    return LargestStep(sum(length for _, length in prompts), len(prompts) + len(singles), seconds)


def _num_seqs(info: ExecutorInfo, wanted: int) -> int:
    return max(min(wanted or info.max_num_seqs, info.num_blocks, info.num_states or info.num_blocks), 1)


_Chunk = tuple[int, int]  # a prompt chunk: where it starts in its sequence, and its length


def _prompts(info: ExecutorInfo, num_tokens: int, num_seqs: int, context: int) -> list[_Chunk]:
    """Return the lengths of as few prompts as hold `num_tokens` tokens, or of fewer if the KV cache has no room for
    them."""
    chunks: list[_Chunk] = []
    num_blocks = info.num_blocks
    start = min(context, info.max_model_len - 1, num_blocks * info.block_size - 1)
    while num_tokens > 0 and num_blocks > 0 and len(chunks) < num_seqs:
        length = min(num_tokens, info.max_model_len - start, num_blocks * info.block_size - start)
        chunks.append((start, length))
        num_tokens -= length
        num_blocks -= _num_blocks(chunks[-1], info)
        start = 0
    return chunks


def _num_blocks(chunk: _Chunk, info: ExecutorInfo) -> int:
    return -(-sum(chunk) // info.block_size)


def _run(executor: Executor, step: int, chunks: list[_Chunk]) -> float:
    """Run a step that computes the given chunks. If the model generates, the step samples a token after each chunk.
    Returns its seconds. On a GPU, all prompt tokens are scored as well, because scoring takes the most memory."""
    info = executor.info
    is_gpu, generates = info.device.startswith("cuda"), info.task == "generate"
    rows, block = [], 0
    for seq_id, (start, length) in enumerate(chunks):
        blocks = tuple(range(block, block + _num_blocks((start, length), info)))
        tokens = (0,) * (start + length)
        logits = length if is_gpu and generates else 1
        row = PlanRow(seq_id, start, length, logits, new_tokens=tokens, new_blocks=blocks, num_prompt=len(tokens))
        row.state = seq_id if info.num_states else -1
        rows.append(row)
        block += len(blocks)
    num_demanding = len(rows) if is_gpu else _MAX_DEMANDING_ON_CPU
    samples = [
        SampleRow(row.seq_id, last - 1, _DEMANDING if number < num_demanding else _GREEDY)
        for number, (row, last) in enumerate(_with_ends(rows) if generates else [])
    ]
    scores = [
        ScoreRun(row.seq_id, last - row.num_logits, (0,) * row.num_logits, _NUM_TOP)
        for row, last in _with_ends(rows)
        if row.num_logits > 1
    ]
    began = time.perf_counter()
    executor.forward(StepPlan(step, rows))
    executor.sample(SampleBatch(step, samples, scores))
    return time.perf_counter() - began


def _with_ends(rows: list[PlanRow]) -> Iterable[tuple[PlanRow, int]]:
    """Return each row with the total number of logits rows up to the end of that row."""
    return zip(rows, accumulate(row.num_logits for row in rows), strict=True)
