"""Compiles the fused adapter kernels for a GPU that the machine may lack, in all sizes that `fused` uses."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from bridle.lora.fused import COLUMNS, INPUT_BYTES, LONG_TILE, MAX_RANKS, MIN_RANKS, RANK_BYTES, SHORT_TILE

#: Bytes that one program may have, by compute capability.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}
#: Bytes: a few are what the assembler trades for more programs at once.
MAX_SPILLED = 64
_SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}


def compile_all(capability: int, dtype: str) -> Iterator[Any]:
    """Compile both kernels for both tile sizes and for the smallest and largest rank, with arguments aligned as
    usual."""
    from bridle.lora import fused_kernels

    for tile, ranks in product((SHORT_TILE, LONG_TILE), (MIN_RANKS, MAX_RANKS)):
        sizes: dict[str, Any] = {"block_rows": tile, "block_ranks": ranks, "is_wide": False}
        inputs = {"block_inputs": INPUT_BYTES[tile] // _SIZES[dtype]}
        pointers = {"rows": f"*{dtype}", "hidden": "*fp32", "tiles": "*i64"}
        yield _compile(fused_kernels.shrink, pointers, {**sizes, **inputs}, capability)
        sizes["block_ranks"] = min(ranks, RANK_BYTES // _SIZES[dtype])
        columns = {"block_columns": COLUMNS[tile], "column_step": 16}
        pointers = {"hidden": "*fp32", "out": f"*{dtype}", "tiles": "*i64"}
        yield _compile(fused_kernels.expand, pointers, {**sizes, **columns}, capability)


def num_spilled(kernel: Any, capability: int, folder: Path) -> int:
    """Return the number of bytes that a kernel spills from registers."""
    return usage(kernel, capability, folder)[1]


def usage(kernel: Any, capability: int, folder: Path) -> tuple[int, int]:
    """Return a kernel's registers per thread and the bytes that it spills from registers."""
    from triton import knobs
    from triton.backends.nvidia.compiler import sm_arch_from_capability

    code = folder / "kernel.ptx"
    code.write_text(kernel.asm["ptx"])
    arch = f"--gpu-name={sm_arch_from_capability(capability)}"
    command = [_assembler(knobs, capability), "-v", arch, str(code), "-o", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    return max(map(int, re.findall(r"Used (\d+) registers", said))), spilled


def _assembler(knobs: Any, capability: int) -> str:
    """Return the path of `ptxas`; Triton contains a separate one for the newest GPUs."""
    return str((knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas).path)


def _compile(kernel: Any, pointers: dict[str, str], sizes: dict[str, Any], capability: int) -> Any:
    free = {"site", "num_shares", "hidden_share_stride"}  # not told apart by their values
    aligned = {name for name in kernel.arg_names if name not in free}
    return compile_kernel(kernel, pointers, sizes, capability, aligned, {})


def compile_kernel(
    kernel: Any,
    pointers: dict[str, str],
    sizes: dict[str, Any],
    capability: int,
    aligned: set[str],
    options: dict[str, Any],
) -> Any:
    """Compile `kernel` with the constants `sizes`; arguments whose type `pointers` does not state are int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = {name: value for name, value in sizes.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for number, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in sizes else pointers.get(name, "i32")
        if name not in sizes and name in aligned:
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, sizes, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
