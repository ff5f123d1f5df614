"""Rows of tensors in another order than the library's.

llama.cpp rotates neighbors of a head for some architectures where the library rotates halves, so its converter brings
the rows of queries and keys into that order. Heads of values that share a key head lie apart in some files. Rows are
whole runs of blocks, so packed ones are put in order as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bridle.gguf.fields import key_heads
from bridle.gguf.rules import Order


def library_order(order: Order, num_rows: int, config: Any) -> Tensor | None:
    """For each row of the library's tensor its row in the file; None if both have the same order. Raises `ValueError`
    if that many rows cannot belong to a model with this configuration."""
    if not order:
        return None
    if order in ("query", "key"):
        heads = config.num_attention_heads if order == "query" else config.num_key_value_heads
        return _runs(num_rows, int(heads), 2).view(int(heads), -1, 2).transpose(1, 2).reshape(-1)
    if order == "by head":
        return _groups(num_rows, int(config.num_attention_heads), key_heads(config))
    keys, values = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
    if order == "values":
        return _runs(num_rows, values // keys, keys).transpose(0, 1).reshape(-1)
    first = 2 * keys * int(config.linear_key_head_dim)
    if order == "late values":
        late = _runs(num_rows - first, values // keys, keys).transpose(0, 1).reshape(-1)
        return torch.cat((torch.arange(first), first + late))
    return _by_key_head(num_rows, keys, first)


def _runs(num_rows: int, *sides: int) -> Tensor:
    """Numbers of rows in `sides` of runs that have the same length, [*sides, length]."""
    if num_rows <= 0 or num_rows % max(sides[0] * sides[1], 1):
        raise ValueError(f"{num_rows} rows cannot be divided into {sides[0]} x {sides[1]}")
    if not sides[0]:
        raise ValueError("there are fewer heads of values than of keys")
    return torch.arange(num_rows).view(*sides, -1)


def _groups(num_rows: int, heads: int, keys: int) -> Tensor:
    """All queries, keys and values, where the library has those of one key head after another."""
    size = num_rows // (heads + 2 * keys)
    if heads % keys or num_rows != size * (heads + 2 * keys):
        raise ValueError(f"{num_rows} rows cannot be divided into {heads} queries and {keys} keys")
    rows = torch.arange(num_rows)
    queries, rest = rows[: heads * size], rows[heads * size :].view(2, keys, size)
    return torch.cat((queries.view(keys, -1), rest[0], rest[1]), 1).reshape(-1)


def _by_key_head(num_rows: int, keys: int, first: int) -> Tensor:
    """Queries, keys, values and gates, each of all heads, where the library has all four of one head after another."""
    queries = torch.arange(first).view(2, keys, -1)
    values = _runs(num_rows - first, 2, keys) + first
    return torch.cat((queries[0], queries[1], values[0], values[1]), 1).reshape(-1)


def file_order(order: Order, num_rows: int, config: Any) -> Tensor | None:
    """For each row of the file its row in the library's tensor; None and errors as above."""
    rows = library_order(order, num_rows, config)
    return None if rows is None else rows.argsort()
