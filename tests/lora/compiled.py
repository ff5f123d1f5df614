"""The fused kernels, compiled for a GPU that need not be there, in all sizes that `fused` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from bridle.lora.fused import COLUMNS, INPUT_BYTES, LONG_TILE, MAX_RANKS, MIN_RANKS, SHORT_TILE

#: Bytes that one program may have, by compute capability.
SHARED_MEMORY = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
_SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}


def compile_all(capability: int, dtype: str) -> Iterator[Any]:
    """Both kernels, for both sizes of tiles, the fewest and the most ranks; arguments aligned as they mostly are."""
    from bridle.lora import fused_kernels

    for tile, ranks in product((SHORT_TILE, LONG_TILE), (MIN_RANKS, MAX_RANKS)):
        sizes = {"block_rows": tile, "block_ranks": ranks, "is_wide": False}
        inputs = {"block_inputs": INPUT_BYTES[tile] // _SIZES[dtype]}
        pointers = {"rows": f"*{dtype}", "hidden": "*fp32", "tiles": "*i64"}
        yield _compile(fused_kernels.shrink, pointers, {**sizes, **inputs}, capability)
        columns = {"block_columns": COLUMNS, "column_step": 16}
        pointers = {"hidden": "*fp32", "out": f"*{dtype}", "tiles": "*i64"}
        yield _compile(fused_kernels.expand, pointers, {**sizes, **columns}, capability)


def _compile(kernel: Any, pointers: dict[str, str], sizes: dict[str, Any], capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    free = {"site", "num_shares", "hidden_share_stride"}  # not told apart by their values
    signature, attributes = {}, {}
    for number, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in sizes else pointers.get(name, "i32")
        if name not in sizes and name not in free:
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, sizes, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))
