"""Forms in which files hold tensors otherwise than the library's models: rows of heads in another order, norms with one
added, a single row as a line.

llama.cpp rotates neighbors of a head for some architectures where the library rotates halves, so its converter brings
the rows of queries and keys into that order. Rows are whole runs of blocks, so packed ones are put in order as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bridle.gguf.rules import Change


def heads_of(change: Change, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of heads that the rows of a tensor belong to; 0 if their order is the same in both formats."""
    return {"query": num_heads, "key": num_kv_heads}.get(change, 0)


def heads_in(change: Change, config: Any) -> int:
    """The same of a model with this configuration, which is asked only if order differs: heads may vary by layer."""
    if change not in ("query", "key"):
        return 0
    return heads_of(change, config.num_attention_heads, config.num_key_value_heads)


def library_order(num_rows: int, num_heads: int) -> Tensor:
    """For each row of the library's tensor its row in the file: neighbors there are halves here."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def woven(parts: Sequence[Tensor]) -> Tensor:
    """Tensors [E, n, ...] of gates and of values, their rows in turns."""
    return torch.stack(list(parts), 2).flatten(1, 2)


def unwoven(tensor: Tensor, part: int, num_parts: int) -> Tensor:
    """The rows of one of them, a view."""
    return tensor[:, part::num_parts]


def file_order(num_rows: int, num_heads: int) -> Tensor:
    """For each row of the file its row in the library's tensor."""
    return torch.arange(num_rows).view(num_heads, 2, -1).transpose(1, 2).reshape(-1)
