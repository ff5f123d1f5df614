"""Chooses the attention kernel for long chunks while a model is loaded. External kernels are tried in the same order at
every start. The first kernel that gives the same result as bridle's Triton kernel, and is not slower, computes chunks
of `MIN_TOKENS` tokens or more. The kernel of bridle computes all shorter chunks, and all chunks if no external kernel
qualifies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.model.batch_inputs import pack_step
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.prompts import MIN_TOKENS, PromptKernel, candidates
from bridle.model.kv_cache import KVCache, LayerCache
from bridle.model.sequence_state import CachedRequestState

_log = logging.getLogger(__name__)

#: Tokens and context of the two trials of results; the second one is also the trial of speed.
TRIALS = ((600, 600), (MIN_TOKENS, 900))
SPEED_TRIAL = (2_048, 4_096)
#: In half precision, weights are rounded before they are multiplied, and results too.
_TOLERANCE = 3e-2

#: Returns the seconds that a call takes.
Timer = Callable[[Callable[[], object]], float]


def choose_prompt_kernel(kernel: PagedKernel, geometry: Geometry, dtype: torch.dtype, block_size: int) -> None:
    """Set the external kernel that `kernel` uses for long chunks, if one is available. External kernels require CUDA
    and half precision."""
    device = kernel.machine.device
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return
    with torch.cuda.device(device):
        kernel.prompts = first_that_does(candidates(dtype), kernel, geometry, dtype, block_size, event_seconds)


@torch.inference_mode()
def first_that_does(
    found: Iterable[PromptKernel],
    kernel: PagedKernel,
    geometry: Geometry,
    dtype: torch.dtype,
    block_size: int,
    seconds: Timer,
) -> PromptKernel | None:
    """Return the first kernel in `found` that gives the same result as `kernel` and is not slower. The log has the
    reason why each earlier kernel is not used."""
    shapes = sorted(
        {shape for shape in geometry.layers.values() if not (shape.has_softcap or shape.has_sinks)}, key=str
    )
    for candidate in found:
        mine = [shape for shape in shapes if candidate.takes(_options(shape), shape.key_dim, shape.value_dim)]
        if not mine:
            continue
        problem = _problem(candidate, kernel, mine, dtype, block_size, seconds)
        if problem is None:
            _log.info("kernel for the attention of prompts of at least %d tokens: %s", MIN_TOKENS, candidate.name)
            return candidate
        _log.info("kernel %s is not used for the attention of prompts: %s", candidate.name, problem)
    return None


def event_seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes on the current CUDA device: the best of three calls, after a warm-up
    call."""
    event: Any = torch.cuda.Event
    times: list[float] = []
    for _ in range(4):
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e-3 * begin.elapsed_time(end))
    return min(times[1:])


def _problem(
    candidate: PromptKernel,
    kernel: PagedKernel,
    shapes: list[LayerGeometry],
    dtype: torch.dtype,
    block_size: int,
    seconds: Timer,
) -> str | None:
    """Compare an external kernel with `kernel`; return a description of the problem, or None."""
    try:
        for shape in shapes:
            for trial in TRIALS:
                scene = _scene(kernel, shape, trial, dtype, block_size)
                want, have = (_attend(kernel, by, *scene).float() for by in (None, candidate))
                error, limit = float((want - have).abs().max()), _TOLERANCE * max(1.0, float(want.abs().max()))
                if not error <= limit:  # NaN counts as an error, too
                    return f"{trial[0]} of {trial[1]} tokens differ by {error:.3g} (limit {limit:.3g})"
        scene = _scene(kernel, shapes[0], SPEED_TRIAL, dtype, block_size)
        times = [seconds(partial(_attend, kernel, by, *scene)) for by in (candidate, None)]
    except torch.OutOfMemoryError:
        raise  # the error may be temporary
    except Exception as failure:  # a version, a device or a driver that it was not built for
        return f"{type(failure).__name__}: {failure}"
    return None if times[0] <= times[1] else f"it takes {1e3 * times[0]:.2f} ms, the own kernel {1e3 * times[1]:.2f}"


def _scene(
    kernel: PagedKernel, shape: LayerGeometry, trial: tuple[int, int], dtype: torch.dtype, block_size: int
) -> tuple[Tensor, LayerCache, AttentionOptions]:
    """Begin a trial step of one sequence in `kernel`. Return the step's queries, a cache of random values in scattered
    pages, and the attention options."""
    (length, context), device = trial, kernel.machine.device
    generator = torch.Generator().manual_seed(context)
    num_blocks = -(-context // block_size)
    cache = KVCache(Geometry({0: shape}, 1), num_blocks, block_size, dtype, device).layers[0]
    for part in cache.parts:
        part.copy_(torch.randn(part.shape, generator=generator))
    mirror = CachedRequestState()
    mirror.tokens = [0] * context
    mirror.add_blocks(reversed(range(num_blocks)))
    kernel.begin(pack_step([PlanRow(0, context - length, length)], [mirror], block_size, device))
    query = torch.randn(length, shape.num_heads, shape.key_dim, generator=generator).to(device, dtype)
    return query, cache, _options(shape)


def _attend(
    kernel: PagedKernel, by: PromptKernel | None, query: Tensor, cache: LayerCache, options: AttentionOptions
) -> Tensor:
    usual, kernel.prompts = kernel.prompts, by
    try:
        return kernel.attend(query, cache, options)
    finally:
        kernel.prompts = usual


def _options(shape: LayerGeometry) -> AttentionOptions:
    return AttentionOptions(shape.key_dim**-0.5, shape.window)
