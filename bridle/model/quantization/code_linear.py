"""A linear layer over `Codes`, computed by bridle's own Triton kernels. `CodeLinear` is used on CUDA for weights that
are stored packed. For few rows, the inputs are cut into shares, which are computed in parallel, so that even a small
matrix is read at full speed. A second kernel adds the results of the shares. For more rows, one program computes all
shares one after the other. Parallel and sequential shares are added in the same order, and shares depend only on the
weight's shape. So a row has the same bits in batches of any size up to `MAX_CODED` rows. With more than `MAX_CODED`
rows, it is several times as fast to decode the weight once and multiply by torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridle.lora.fused import Machine
from bridle.model.quantization.codes import RUN, Codes, join_codes

#: Maximum rows of a step for which shares are computed in parallel.
MAX_SHORT = 64
#: Maximum rows of a step for which products read the codes. Long prompts have more rows.
MAX_CODED = 256
#: Rows of a program. A larger number would use other instructions, whose sums may differ.
SHORT_ROWS, LONG_ROWS = 16, 32
#: Columns of a program, and of a program that adds shares.
COLUMNS, JOINED_COLUMNS = 128, 512
#: Number of programs that keeps any GPU busy, and the minimum number of blocks of slots for a program.
ENOUGH, MIN_BLOCKS = 256, 4


@cache
def kernels() -> Any:
    """Return the module of Triton kernels. The import takes a moment, and needs Triton."""
    from bridle.model.quantization import code_kernels

    return code_kernels


@cache
def _machine(device: torch.device) -> Machine:
    return Machine(device)


class CodeLinear(nn.Module):
    """A linear layer with packed weights that replaces an `nn.Linear`. Reading `weight` decodes the weight to floating
    point, which is slow."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None

    def __init__(self, codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes, self.dtype = codes, dtype
        self.out_features, self.in_features = codes.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        for name in ("words", "scales", "zeros", "order"):  # for whoever counts or moves what a model holds
            self.register_buffer(name, getattr(codes, name), persistent=False)
        self.num_blocks = codes.words.shape[0] // RUN
        self.share_blocks = share_blocks(self.num_blocks, self.out_features)

    @property
    def weight(self) -> Tensor:
        """Return the decoded weight, [out, in]."""
        return self.codes.number().to(self.dtype)

    def joined(self, others: list[CodeLinear]) -> CodeLinear | None:
        """Return one layer that gives the outputs of this layer and of `others`, concatenated; None if their codes have
        different layouts."""
        layers = [self, *others]
        codes = join_codes([layer.codes for layer in layers])
        if codes is None:
            return None
        bias = None if self.bias is None else torch.cat([layer.bias for layer in layers])  # type: ignore[misc]
        return CodeLinear(codes, bias, self.dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the layer: [..., in] -> [..., out]"""
        machine = _machine(rows.device)
        if rows.device.type == "cpu" and not machine.is_wide:
            return functional.linear(rows, self.weight.to(rows.dtype), self.bias)
        flat = rows.reshape(-1, self.in_features)
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        with machine.chosen():
            if flat.shape[0] > MAX_CODED:
                out = self._multiply_decoded(flat)
            else:
                out = flat.new_empty(flat.shape[0], self.out_features)
                if flat.shape[0]:
                    self._multiply(flat, out, machine.is_wide)
        return out.view(*rows.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor, out: Tensor, is_wide: bool) -> None:
        num_rows, num_shares = rows.shape[0], -(-self.num_blocks // self.share_blocks)
        block_rows = SHORT_ROWS if num_rows <= SHORT_ROWS else LONG_ROWS
        grid = (-(-num_rows // block_rows), -(-self.out_features // COLUMNS))
        sizes = {**self._form(is_wide), "block_rows": block_rows, "block_columns": COLUMNS}
        bias = out if self.bias is None else self.bias  # without a bias, any valid pointer
        if num_shares == 1 or num_rows > MAX_SHORT:
            whole = kernels().multiply_whole[grid]
            whole(*self._inputs(rows), bias, out, *self._numbers(rows), num_shares, has_bias=bias is not out, **sizes)
            return
        sums = rows.new_empty(num_shares, num_rows, self.out_features, dtype=torch.float32)
        kernels().multiply_part[(*grid, num_shares)](*self._inputs(rows), sums, *self._numbers(rows), **sizes)
        kernels().join_shares[(num_rows, -(-self.out_features // JOINED_COLUMNS))](
            sums,
            bias,
            out,
            num_rows,
            self.out_features,
            num_shares,
            has_bias=bias is not out,
            block_columns=JOINED_COLUMNS,
        )

    def _multiply_decoded(self, rows: Tensor) -> Tensor:
        weight = rows.new_empty(self.in_features, self.out_features)
        numbers, form = self._numbers(rows), self._form(False)
        del form["is_wide"]
        grid = (self.num_blocks, -(-self.out_features // COLUMNS))
        kernels().decode[grid](*self._inputs(rows)[1:], weight, *numbers[1:5], **form, block_columns=COLUMNS)
        return rows @ weight if self.bias is None else torch.addmm(self.bias, rows, weight)

    def _inputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        codes = self.codes
        zeros, order = (codes.words if each is None else each for each in (codes.zeros, codes.order))
        return rows, codes.words, codes.scales, zeros, order

    def _numbers(self, rows: Tensor) -> tuple[int, ...]:
        num_groups, group_runs = self.codes.scales.shape[0], self.codes.group_slots // RUN
        sizes = (rows.shape[0], self.in_features, self.out_features, num_groups, group_runs)
        return *sizes, rows.stride(0), self.num_blocks, self.share_blocks

    def _form(self, is_wide: bool) -> dict[str, Any]:
        codes = self.codes
        return {
            "zero": codes.zero,
            "bits": codes.bits,
            "is_float": codes.is_float,
            "has_zeros": codes.zeros is not None,
            "has_order": codes.order is not None,
            "is_wide": is_wide,
        }

    def _apply(self, fn: Any, recurse: bool = True) -> CodeLinear:
        """Apply `fn` to the buffers, as `nn.Module` does, and let the codes refer to the new buffers."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.codes = replace(self.codes, words=self.words, scales=self.scales, zeros=self.zeros, order=self.order)
        return self


def share_blocks(num_blocks: int, num_columns: int) -> int:
    """Return the number of blocks of slots in a share. The number of blocks in a share depends only on the weight's
    shape, so that results have the same bits in any batch and on any GPU."""
    wanted = -(-ENOUGH // -(-num_columns // COLUMNS))
    num_shares = max(min(wanted, num_blocks // MIN_BLOCKS), 1)
    return -(-num_blocks // num_shares)
