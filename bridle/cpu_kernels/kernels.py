"""The kernels of one shared object, called with checked arguments. A pointer to a tensor is passed to C only if the
tensor has the type, device and size that the C code expects."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridle.cpu_kernels.ggml import BlockType
from bridle.cpu_kernels.packing import BLOCK, KINDS, PackedMatrix, packed_sizes
from bridle.cpu_kernels.threads import is_parallel
from bridle.errors import InternalError

#: The version of the C functions' interface.
VERSION = 10
#: Maximum number of products of 8-bit numbers whose sum fits into 32 bits.
MAX_INPUTS = 1 << 16
_MAX_ROWS = 1 << 20


class CMatrix(ctypes.Structure):
    """The struct `matrix` of sources/linear.h."""

    _fields_ = (
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int),
        ("outputs", c_int),
        ("inputs", c_int),
        ("given", c_int),
    )


class Matrix:
    """A packed matrix that kernels can multiply by. This object keeps the matrix's tensors alive."""

    def __init__(self, packed: PackedMatrix, bias: Tensor | None, lanes: int) -> None:
        self.kind, self.outputs, self.inputs, self.given = packed.kind, packed.outputs, packed.inputs, packed.given
        self.weights, self.scales = packed.weights, packed.scales
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._check(lanes)
        self.c = CMatrix(
            self.weights.data_ptr(),
            self.scales.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            KINDS[self.kind],
            self.outputs,
            self.inputs,
            self.given,
        )

    def _check(self, lanes: int) -> None:
        panels = -(-self.outputs // lanes)
        weights, scales = packed_sizes(self.kind, panels * lanes, self.inputs)
        require(0 < self.outputs < 1 << 30, f"a matrix has {self.outputs} outputs")
        fills = self.inputs == self.given if self.kind == "float32" else self.inputs % BLOCK == 0
        require(
            0 < self.given <= self.inputs <= MAX_INPUTS and fills,
            f"a matrix has {self.given} of {self.inputs} inputs; kernels sum up to {MAX_INPUTS}, in blocks of {BLOCK}",
        )
        check_tensor(self.weights, torch.uint8, weights, "weights")
        check_tensor(self.scales, torch.uint8, scales, "scales")
        if self.bias is not None:
            check_tensor(self.bias, torch.float32, self.outputs, "the bias")


class Kernels:
    """The functions of one loaded shared object."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._library = library = ctypes.CDLL(str(path))
        if library.bridle_version() != VERSION:
            raise InternalError(f"{path.name} has interface {library.bridle_version()}; this bridle needs {VERSION}")
        self.lanes: int = library.bridle_lanes()
        self.zero: int = library.bridle_zero()
        #: Number of query rows of a chunk of attention.
        self.queries: int = library.bridle_queries()
        self._linear = self.function("bridle_linear", POINTER(CMatrix), *[c_void_p] * 3, c_int, c_int)
        self._pack = self.function("bridle_pack", *[c_void_p] * 3, *[c_int] * 4)
        self.threads = 1

    def function(self, name: str, *arguments: Any) -> Any:
        """Return the C function called `name`, which has no result. The caller of the C function must check its
        arguments."""
        function = getattr(self._library, name)
        function.argtypes, function.restype = arguments, None
        return function

    def use_threads(self, threads: int) -> None:
        """Compute with at least `threads` threads from now on."""
        self.threads = self._library.bridle_threads(threads)

    def pack(self, kind: BlockType, blocks: Tensor, weights: Tensor, scales: Tensor) -> None:
        """Convert rows of blocks [out, bytes] to the kernels' order, and write them to `weights` and `scales`.
        `weights` and `scales` must have space for whole panels of outputs."""
        outputs, inputs = blocks.shape[0], blocks.shape[1] // kind.num_bytes * kind.inputs
        sizes = packed_sizes(kind.name, -(-outputs // self.lanes) * self.lanes, inputs)
        check_tensor(blocks, torch.uint8, outputs * kind.row_bytes(inputs), "blocks")
        check_tensor(weights, torch.uint8, sizes[0], "weights")
        check_tensor(scales, torch.uint8, sizes[1], "scales")
        pointers = (blocks.data_ptr(), weights.data_ptr(), scales.data_ptr())
        self._pack(*pointers, KINDS[kind.name], outputs, inputs, is_parallel())

    def matrix(self, packed: PackedMatrix, bias: Tensor | None) -> Matrix:
        return Matrix(packed, bias, self.lanes)

    def linear(self, matrix: Matrix, rows: Tensor) -> Tensor:
        """Multiply float rows: [n, in] -> [n, out]"""
        num_rows = rows.shape[0]
        require(rows.dim() == 2 and num_rows < _MAX_ROWS, f"rows of shape {tuple(rows.shape)}")
        check_tensor(rows, torch.float32, num_rows * matrix.given, "rows")
        out = torch.empty(num_rows, matrix.outputs, dtype=torch.float32)
        if num_rows:
            scratch = torch.empty(scratch_bytes(matrix, num_rows), dtype=torch.uint8)
            pointers = (rows.data_ptr(), scratch.data_ptr(), out.data_ptr())
            self._linear(matrix.c, *pointers, num_rows, is_parallel())
        return out


def scratch_bytes(matrix: Matrix, num_rows: int) -> int:
    """Return the bytes of scratch memory that a product needs for its input rows. For a quantized matrix, rows are
    rounded to integers, with a scale and two sums of 4 bytes per block. For a float32 matrix, rows stay floats."""
    if matrix.kind == "float32":
        return 4 * num_rows * matrix.inputs
    return num_rows * (matrix.inputs + matrix.inputs // BLOCK * 12)


def check_tensor(tensor: Tensor, dtype: torch.dtype, size: int, what: str) -> None:
    """Raise `InternalError` if `tensor` is not contiguous CPU memory of `size` values of type `dtype`."""
    require(
        tensor.device.type == "cpu" and tensor.dtype is dtype and tensor.is_contiguous() and tensor.numel() == size,
        f"{what}: {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, contiguous: {tensor.is_contiguous()}; "
        f"{size} contiguous {dtype} on the cpu are wanted",
    )


def require(holds: bool, what: str) -> None:
    """Raise `InternalError` unless `holds` is true. A kernel called with wrong arguments could read outside of its
    memory."""
    if not holds:
        raise InternalError(f"a CPU kernel cannot take these arguments: {what}")
