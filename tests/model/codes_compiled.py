"""Compiles the kernels for packed weights for a GPU that the machine may lack, in the sizes that `CodeLinear` uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridle.model.quantization.code_linear import COLUMNS, JOINED_COLUMNS, LONG_ROWS, SHORT_ROWS
from tests.lora.compiled import compile_kernel


def compile_all(capability: int, dtype: str, form: str) -> Iterator[Any]:
    """Compile all kernels for one form of weights: a number of bits, with or without zero points and activation
    order."""
    from bridle.model.quantization import code_kernels

    is_float = form == "float8"
    sizes: dict[str, Any] = {
        "zero": 8,
        "bits": 8 if is_float else int(form[0]),
        "is_float": is_float,
        "has_zeros": "zeros" in form,
        "has_order": "order" in form,
        "has_bias": True,
        "is_wide": False,
        "block_columns": COLUMNS,
    }
    pointers = {"rows": f"*{dtype}", "words": "*i32", "scales": "*fp32" if is_float else "*fp16"}
    pointers |= {"zeros": "*u8" if "zeros" in form else "*i32", "order": "*i32", "bias": f"*{dtype}"}
    pointers |= {"out": f"*{dtype}", "sums": "*fp32"}
    aligned = {*pointers, "num_columns", "num_inputs", "row_stride"}
    for rows in (SHORT_ROWS, LONG_ROWS):
        tile = {**sizes, "block_rows": rows}
        yield compile_kernel(code_kernels.multiply_part, pointers, tile, capability, aligned, {})
        yield compile_kernel(code_kernels.multiply_whole, pointers, tile, capability, aligned, {})
    whole = {name: value for name, value in sizes.items() if name not in ("has_bias", "is_wide")}
    yield compile_kernel(code_kernels.decode, pointers, whole, capability, aligned, {})
    joined = {**sizes, "block_columns": JOINED_COLUMNS}
    yield compile_kernel(code_kernels.join_shares, pointers, joined, capability, aligned, {})
