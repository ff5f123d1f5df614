"""Compiles the kernels of fused layers for a GPU that the machine may lack, as `fused_step` uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from bridle.model.fused_step import GATE_NUMBERS, HEAD_NUMBERS, MAX_ROW, ROUNDED_NUMBERS, warps_for


class Shape(NamedTuple):
    """Sizes of a layer: hidden size, heads and their width; whether its norms are Gemma's, and whether they span all
    heads."""

    hidden: int
    num_heads: int
    kv_heads: int
    dim: int
    is_wide: bool = False
    is_norm_of_all: bool = False


#: Qwen3, Gemma 3, OLMo 2, and the largest of all.
SHAPES = (Shape(1024, 16, 8, 128), Shape(5376, 32, 16, 128, True), Shape(5120, 40, 8, 128, False, True))
SHAPES += (Shape(MAX_ROW, 128, 8, 256),)


def compile_all(capability: int, dtype: str, shape: Shape) -> Iterator[Any]:
    """Compile all kernels for one layer, with all kinds of norms and without any."""
    from bridle.model.kernels import layer_kernels

    weight = "*fp32" if shape.is_wide else f"*{dtype}"
    block = 1 << (shape.hidden - 1).bit_length()
    for has_norms in (True, False):
        sizes: dict[str, Any] = {"size": shape.hidden, "block": block, "is_added": True}
        sizes |= {"has_added_norm": has_norms, "has_norm": has_norms, "num_warps": warps_for(block)}
        for is_rounded in (False, True)[: 2 if capability >= 89 and dtype != "fp32" else 1]:
            kept = {"normed": "*fp8e4nv"} if is_rounded else {}
            yield _compile(
                layer_kernels.add_and_norm, dtype, weight, sizes | {"is_rounded": is_rounded}, capability, kept
            )
        block_dim = 1 << (shape.dim - 1).bit_length()
        sizes = {"num_heads": shape.num_heads, "kv_heads": shape.kv_heads, "dim": shape.dim, "block_dim": block_dim}
        sizes |= {"block_heads": max(1, HEAD_NUMBERS // block_dim), "has_norm": has_norms, "is_rotated": True}
        sizes |= {"is_norm_of_all": has_norms and shape.is_norm_of_all, "num_warps": 4}
        sizes["stride"] = shape.dim  # of one table of angles
        yield _compile(layer_kernels.turn_and_store, dtype, weight, sizes, capability)
    for is_gelu in (False, True):
        sizes = {"size": 4 * shape.hidden, "block": GATE_NUMBERS, "is_gelu": is_gelu, "num_warps": 4}
        yield _compile(layer_kernels.gate, dtype, weight, sizes, capability)
        if capability >= 89 and dtype != "fp32":
            block = min(block_of(4 * shape.hidden), ROUNDED_NUMBERS)
            sizes = {"size": 4 * shape.hidden, "block": block, "is_gelu": is_gelu, "num_warps": warps_for(block)}
            yield _compile(layer_kernels.gate_rounded, dtype, weight, sizes, capability, {"out": "*fp8e4nv"})


def block_of(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _compile(
    kernel: Any, dtype: str, weight: str, sizes: dict[str, Any], capability: int, kept: dict[str, str] | None = None
) -> Any:
    from tests.lora.compiled import compile_kernel

    options = {"num_warps": sizes["num_warps"]}
    sizes = {name: value for name, value in sizes.items() if name != "num_warps"}
    numbers = ("rows", "added", "out", "normed", "mixed", "angles", "query", "keys", "values")
    pointers = dict.fromkeys(numbers, f"*{dtype}") | dict.fromkeys(("weight", "added_weight"), weight)
    pointers |= dict.fromkeys(("slots", "places"), "*i64") | {"scales": "*fp32"} | (kept or {})
    scalars = dict.fromkeys(("share", "eps", "added_eps"), "fp32") | {"num_places": "i32"}
    return compile_kernel(kernel, pointers | scalars, sizes, capability, set(pointers), options)
