"""Records the memory accesses of kernels in Triton's interpreter. On a GPU, an address beyond a tensor may belong to
another tensor or crash the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from triton.runtime.interpreter import InterpreterBuilder as Builder

#: Addresses, with the size of a number there.
Touched = list[tuple[npt.NDArray[np.uint64], int]]


@contextmanager
def watched() -> Iterator[Touched]:
    """Record the memory reads and writes of kernels that run inside the `with` block."""
    touched: Touched = []

    def noting(access: Any, pointers: int, mask: int) -> Any:
        def noted(self: Any, *given: Any) -> Any:
            ptrs = given[pointers]
            is_used = np.broadcast_to(given[mask].data, ptrs.data.shape).astype(bool)  # it may be of integers
            touched.append((ptrs.data[is_used], ptrs.get_element_ty().primitive_bitwidth // 8))
            return access(self, *given)

        return noted

    with (
        patch.object(Builder, "create_masked_load", noting(Builder.create_masked_load, 0, 1)),
        patch.object(Builder, "create_masked_store", noting(Builder.create_masked_store, 0, 2)),
        patch.object(Builder, "create_atomic_rmw", noting(Builder.create_atomic_rmw, 1, 3)),
    ):
        yield touched


def check_owned(touched: Touched, held: Iterable[torch.Tensor]) -> None:
    """Check that each address that a kernel touched lies within one of the tensors, which may be views of others."""
    spans = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes) for one in held})
    begins, ends = (np.array(edges, dtype=np.uint64) for edges in zip(*spans, strict=True))
    ends = np.maximum.accumulate(ends)
    for addresses, size in touched:
        flat = addresses.ravel().astype(np.uint64)
        owners = np.searchsorted(begins, flat, "right") - 1
        assert (owners >= 0).all()
        assert (flat + np.uint64(size) <= ends[owners]).all()
