"""Compares an attention kernel with the reference before a model uses it, because compilers and drivers may fail. There
is one trial with random values for each layer shape. A trial has sequences with one, a few and many new tokens, over
short and long contexts.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.errors import UnsupportedModel
from bridle.model.batch_inputs import PackedStep, pack_step
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels import AttentionKernel, create_kernel
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.prompt_choice import choose_prompt_kernel
from bridle.model.kernels.reference import ReferenceKernel
from bridle.model.kv_cache import KVCache, LayerCache
from bridle.model.sequence_state import CachedRequestState

_log = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: Context and tokens of each sequence of the trial.
_ROWS = ((300, 1), (7, 3), (300, 40), (40, 40))


def tried_kernel(
    name: str, device: torch.device, dtype: torch.dtype, geometry: Geometry, block_size: int
) -> AttentionKernel:
    """Return the kernel called `name`. If the kernel that `auto` chose fails on this device, return plain torch, and
    log the reason. Raises `UnsupportedModel` if a kernel fails that was requested by name."""
    kernel = create_kernel(name, device, dtype)
    if kernel.name not in ("paged", "varlen"):
        return kernel
    problem = find_problem(kernel, geometry, dtype, device, block_size)
    if problem is None:
        if isinstance(kernel, PagedKernel) and name == "auto":
            choose_prompt_kernel(kernel, geometry, dtype, block_size)
        return kernel
    if name != "auto":
        raise UnsupportedModel(f"kernel {name!r} fails here; set kernel to 'auto': {problem}")
    _log.warning(
        "attention on %s is plain torch, one sequence at a time: kernel %r fails: %s", device, kernel.name, problem
    )
    return CpuKernel()


def find_problem(
    kernel: AttentionKernel, geometry: Geometry, dtype: torch.dtype, device: torch.device, block_size: int
) -> str | None:
    """Test the kernel for the layer shapes in `geometry`; return a description of the problem, or None."""
    for shape in sorted(set(geometry.layers.values()), key=str):
        try:
            error, limit = _try(kernel, shape, dtype, device, block_size)
        except torch.OutOfMemoryError:
            raise  # the error may be temporary
        except Exception as failure:  # a compiler, its cache, a driver
            return f"{type(failure).__name__}: {failure}"
        if not error <= limit:  # NaN counts as an error, too
            return f"{shape} differs by {error:.3g} (limit {limit:.3g})"
    return None


@torch.inference_mode()
def _try(
    kernel: AttentionKernel, shape: LayerGeometry, dtype: torch.dtype, device: torch.device, block_size: int
) -> tuple[float, float]:
    """Return the largest error of the kernel in one trial step, and the largest error that rounding can explain."""
    generator = torch.Generator().manual_seed(shape.num_heads)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    num_blocks = sum(-(-context // block_size) for context, _ in _ROWS)
    cache = KVCache(Geometry({0: shape}, 1), num_blocks, block_size, dtype, device).layers[0]
    cache.keys.copy_(random(*cache.keys.shape))
    cache.values.copy_(random(*cache.values.shape))
    mirrors, plans, free = [], [], list(range(num_blocks))
    for number, (context, length) in enumerate(_ROWS):
        mirror = CachedRequestState()
        mirror.tokens = [0] * context
        mirror.add_blocks(free.pop() for _ in range(-(-context // block_size)))
        mirrors.append(mirror)
        plans.append(PlanRow(number, context - length, length))
    step = pack_step(plans, mirrors, block_size, device)
    query = random(step.num_tokens, shape.num_heads, shape.key_dim)
    options = AttentionOptions(
        shape.key_dim**-0.5,
        shape.window,
        30.0 if shape.has_softcap else None,
        random(shape.num_heads) if shape.has_sinks else None,
    )
    want, have = (_attend(each, step, query, cache, options) for each in (ReferenceKernel(), kernel))
    limit = TOLERANCES.get(dtype, 5e-2) * max(1.0, float(want.abs().max()))
    return float((want.float() - have.float()).abs().max()), limit


def _attend(
    kernel: AttentionKernel, step: PackedStep, query: Tensor, cache: LayerCache, options: AttentionOptions
) -> Tensor:
    kernel.begin(step)
    return kernel.attend(query, cache, options)
