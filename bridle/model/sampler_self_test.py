"""Compares the GPU sampler with the standard sampler on random logits before a model uses it, because compilers and
drivers may fail. The comparison also compiles all kernels for the model's vocabulary size."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from bridle.engine.interfaces import Sampler
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepResult
from bridle.lora.adapter_kernel import missing_for_triton
from bridle.model.device_sampler import DeviceSampler
from bridle.model.sampler import StandardSampler
from bridle.outputs import Logprob
from bridle.sampling import SamplingParams

_log = logging.getLogger(__name__)

_SCALE = 3.0  # of random logits, so that top-p keeps few tokens of some rows and many of others
_NUM_LOGITS = 4
_TOLERANCE = 1e-3
KINDS: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.3, top_p=0.5),
    SamplingParams(temperature=2.0, top_p=0.9),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(min_p=0.02, logprobs=3, logprobs_mode="processed"),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(logit_bias={1: 4.0}),
)


def tried_sampler(device: torch.device, dtype: torch.dtype, vocab: int) -> Sampler:
    """Return the GPU sampler if it samples the same tokens as the standard sampler from logits of type `dtype` and
    width `vocab`. If the tokens differ, return the standard sampler, and log the reason."""
    problem = missing_for_triton(device)
    problem = find_problem(DeviceSampler(device), device, dtype, vocab) if problem is None else f"that needs {problem}"
    if problem is None:
        return DeviceSampler(device)
    _log.warning("sampling on %s runs in plain torch, not in kernels: %s", device, problem)
    return StandardSampler()


def find_problem(sampler: Sampler, device: torch.device, dtype: torch.dtype, vocab: int) -> str | None:
    """Compare the sampler with the standard sampler; return a description of the problem, or None."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(_NUM_LOGITS, vocab, generator=generator) * _SCALE).to(device, dtype)
    batch = SampleBatch(0, trial_rows(vocab))
    try:
        want, have = (each(logits, batch, lambda row: ([1, 2, 2, 3], 2)) for each in (StandardSampler(), sampler))
    except torch.OutOfMemoryError:
        raise  # the error may be temporary
    except Exception as failure:  # a compiler, its cache, a driver
        return f"{type(failure).__name__}: {failure}"
    return _difference(batch.rows, want, have)


def trial_rows(vocab: int) -> list[SampleRow]:
    """Return trial rows for each kind of sampling parameters. Some rows have a mask or a bias."""
    mask = bytes(range(1, 256)) * (vocab // (8 * 255) + 1)
    return [
        SampleRow(i, i % _NUM_LOGITS, sampling, key=i, draw=7, mask=mask if i % 3 == 0 else None, bias=_bias(i))
        for i, sampling in enumerate(sampling for sampling in KINDS for _ in range(_NUM_LOGITS))
    ]


def _bias(i: int) -> tuple[tuple[int, float], ...]:
    return ((2, 5.0), (3, -math.inf)) if i % 5 == 0 else ()


def _difference(rows: Sequence[SampleRow], want: StepResult, have: StepResult) -> str | None:
    for i, row in enumerate(rows):
        if want.tokens[i] != have.tokens[i]:
            return f"token {have.tokens[i]} was drawn in place of {want.tokens[i]} with {row.sampling.to_dict()}"
        if not _is_close(want.logprobs[i], have.logprobs[i]):
            return f"{have.logprobs[i]} is reported instead of {want.logprobs[i]}"
    return None


def _is_close(want: Logprob | None, have: Logprob | None) -> bool:
    if want is None or have is None:
        return want is have
    values = [(want.logprob, have.logprob), *((a, b) for (_, a), (_, b) in zip(want.top, have.top, strict=False))]
    is_same = want.rank == have.rank and len(want.top) == len(have.top)
    return is_same and all(abs(a - b) <= _TOLERANCE for a, b in values)
