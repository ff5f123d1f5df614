"""Compiles the sampling kernels for a GPU that the machine may lack, in the sizes that `device_draw` uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridle.cpu_kernels.sampling import MAX_BEST
from bridle.model.sampling.device_draw import BLOCK, OPTIONS, PART, block_of

#: Of the widest vocabulary, of which sums are still exact.
VOCAB = 1 << 19
KERNELS = ("count_tokens", "place_biases", "find_peaks", "weigh_parts", "find_edges", "pick", "copy_told", "tell")
_POINTERS = {
    "fp32": "floats biases peaks work heads edges chosen",
    "fp64": "doubles",
    "i64": "longs sums rooms tokens keys best told_sums ranks",
    "i32": "words histories kept addends ints masks counts places equals cut_rows told",
}


def compile_all(capability: int, dtype: str) -> Iterator[Any]:
    """Compile all sampling kernels for a type of logits, and `weigh_parts` for both of its passes."""
    from bridle.model.sampling import draw_kernels

    pointers = {name: f"*{kind}" for kind, names in _POINTERS.items() for name in names.split()}
    pointers["logits"] = f"*{dtype}"
    for name in KERNELS:
        for is_last in (False, True) if name == "weigh_parts" else (True,):
            yield _compile(getattr(draw_kernels, name), pointers, is_last, capability)


def _compile(kernel: Any, pointers: dict[str, str], is_last: bool, capability: int) -> Any:
    from tests.lora.compiled import compile_kernel

    sizes = {"part": PART, "block": BLOCK, "block_parts": block_of(VOCAB // PART), "block_heads": MAX_BEST}
    aligned = {name for name in pointers if name in kernel.arg_names} | {"vocab"}
    return compile_kernel(kernel, pointers, {**sizes, "is_last": is_last}, capability, aligned, dict(OPTIONS))
