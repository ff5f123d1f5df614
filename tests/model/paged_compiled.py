"""Compiles the kernels of paged attention for a GPU that the machine may lack, in the sizes that `paged` uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bridle.lora.fused import Machine
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import LayerGeometry
from bridle.model.kernels.paged import CHUNK, JOIN_WARPS, NEWS, TILE
from bridle.model.kernels.paged_call import AttentionCall
from bridle.model.kv_cache import KVMemory, LayerCache

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
META = torch.device("meta")


class Shape(NamedTuple):
    """Sizes of a layer: query heads, key heads, widths of keys and values, and whether it caps scores and has attention
    sinks."""

    num_heads: int
    kv_heads: int
    dim: int
    value_dim: int
    is_special: bool = False


#: Qwen3 and Llama 3, gpt-oss, Gemma 2, Phi-2, narrow values, and Qwen3-0.6B.
SHAPES = (Shape(32, 8, 128, 128), Shape(64, 8, 64, 64, True), Shape(8, 4, 256, 256, True), Shape(32, 32, 80, 80))
SHAPES += (Shape(16, 16, 192, 128), Shape(16, 8, 128, 128))


def num_buffers(kernel: Any) -> list[int]:
    """Return the numbers of shared-memory buffers for keys and for values, which are filled while the kernel
    multiplies."""
    return [int(count) for count in re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", kernel.asm["ttgir"])]


def compile_all(capability: int, dtype: str, shape: Shape) -> Iterator[Any]:
    """Compile all kernels for one layer, with arguments aligned as usual."""
    from bridle.model.kernels import paged_kernels

    kind = DTYPES[dtype]
    cache = LayerCache(2, 16, LayerGeometry(*shape[:4]), kind, KVMemory(0, META))
    query = torch.empty(1, shape.num_heads, shape.dim, dtype=kind, device=META)
    out = query.new_empty(1, shape.num_heads, shape.value_dim)
    sinks = torch.empty(shape.num_heads, dtype=kind, device=META) if shape.is_special else None
    machine = Machine(META)
    machine.capability = divmod(capability, 10)
    call = AttentionCall(
        query, cache, AttentionOptions(1.0, None, 30.0 if shape.is_special else None, sinks), out, machine
    )
    pointers = dict.fromkeys(("query", "keys", "values", "sinks", "out"), f"*{dtype}")
    pointers |= dict.fromkeys(("sequences", "counts", "works", "tiles", "tables", "news"), "*i32")
    pointers |= dict.fromkeys(("sums", "peaks", "totals"), "*fp32")
    pointers |= dict.fromkeys(("scaling", "softcap"), "fp32")
    short, long = call.sizes(is_short=True), call.sizes(is_short=False)
    join = {name: short[name] for name in ("value_dim", "block_value")} | {"num_warps": JOIN_WARPS, "num_stages": 1}
    special = {"has_sinks": shape.is_special}
    if shape == SHAPES[0]:
        take = {"block": NEWS, "num_warps": 4, "num_stages": 1}
        yield _compile(paged_kernels.take_pages, {**pointers, "news": "*i32"}, take, capability)
    yield _compile(paged_kernels.attend_part, pointers, {**short, "chunk": CHUNK}, capability)
    yield _compile(paged_kernels.attend_works, pointers, {**short, "chunk": CHUNK}, capability)
    yield _compile(paged_kernels.join_parts, pointers, {**join, **special, "chunk": CHUNK}, capability)
    yield _compile(paged_kernels.attend_whole, pointers, {**long, **special, "tile": TILE}, capability)


def _compile(kernel: Any, pointers: dict[str, str], sizes: dict[str, Any], capability: int) -> Any:
    from tests.lora.compiled import compile_kernel

    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    aligned = {name for name, kind in pointers.items() if kind.startswith("*")}
    aligned |= {"token_stride", "head_stride", "key_stride", "value_stride", "out_stride"}
    return compile_kernel(kernel, pointers, sizes, capability, aligned, options)
