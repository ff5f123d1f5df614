"""Quantized blocks of arbitrary bytes with finite scales, as any GGUF file may hold them."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import numpy as np

from bridle.cpu_kernels.features import cpu_features
from bridle.cpu_kernels.ggml import TYPES
from bridle.cpu_kernels.kernels import Kernels
from bridle.cpu_kernels.library import fitting, load

#: Where each type keeps half-precision scales within a block.
_SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(name: str, num_outputs: int, num_inputs: int, seed: int) -> np.ndarray:
    """Return random blocks [out, bytes per row], whose weights are about as large as those of real models."""
    kind = TYPES[name]
    rng = np.random.default_rng(seed)
    parts = rng.integers(0, 256, (num_outputs, num_inputs // kind.inputs, kind.num_bytes), dtype=np.uint8)
    for begin in _SCALES[name]:
        scales = rng.uniform(-1e-3, 1e-3, parts.shape[:2]).astype(np.float16)
        parts[..., begin : begin + 2] = scales[..., None].view(np.uint8)
    return parts.reshape(num_outputs, -1)


OBJECTS = [target.name for target in fitting(platform.system(), platform.machine(), cpu_features())]


@cache
def kernels(name: str) -> Kernels:
    (target,) = [one for one in fitting(platform.system(), platform.machine(), cpu_features()) if one.name == name]
    found = load(target)
    found.use_threads(2)
    return found


PROGRAM = Path(__file__).with_name("sanitized.c")
