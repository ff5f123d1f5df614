"""Reorders rows of tensors between the file's order and the order of transformers. For some architectures, llama.cpp
rotates neighboring values of a head, while transformers rotates halves. So llama.cpp's converter reorders the rows of
queries and keys. In some files, value heads that share a key head are not adjacent. Each row consists of whole blocks,
so rows of quantized tensors can be reordered without decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bridle.gguf.fields import key_heads
from bridle.gguf.rules import Order


def library_order(order: Order, num_rows: int, config: Any) -> Tensor | None:
    """Return for each row of the transformers tensor the row number in the file; None if both have the same order.
    Raises `ValueError` if `num_rows` is impossible for the configuration."""
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
    """Return the row numbers, reshaped to [*sides, length]."""
    if num_rows <= 0 or num_rows % max(sides[0] * sides[1], 1):
        raise ValueError(f"{num_rows} weight rows cannot be divided into {sides[0]} x {sides[1]} runs")
    if not sides[0]:
        raise ValueError("there are fewer value heads than key heads")
    return torch.arange(num_rows).view(*sides, -1)


def _groups(num_rows: int, heads: int, keys: int) -> Tensor:
    """Return the row order for a file with all queries, then all keys, then all values. In transformers, the rows are
    grouped by key head."""
    size = num_rows // (heads + 2 * keys)
    if heads % keys or num_rows != size * (heads + 2 * keys):
        raise ValueError(f"{num_rows} weight rows cannot be divided into {heads} query heads and {keys} key heads")
    rows = torch.arange(num_rows)
    queries, rest = rows[: heads * size], rows[heads * size :].view(2, keys, size)
    return torch.cat((queries.view(keys, -1), rest[0], rest[1]), 1).reshape(-1)


def _by_key_head(num_rows: int, keys: int, first: int) -> Tensor:
    """Return the row order for a file that has all queries first, then keys, values and gates. In transformers, the
    rows are grouped by key head."""
    queries = torch.arange(first).view(2, keys, -1)
    values = _runs(num_rows - first, 2, keys) + first
    return torch.cat((queries[0], queries[1], values[0], values[1]), 1).reshape(-1)


def file_order(order: Order, num_rows: int, config: Any) -> Tensor | None:
    """Return for each row of the file the row number in the transformers tensor. A None result and errors mean the same
    as in `library_order`."""
    rows = library_order(order, num_rows, config)
    return None if rows is None else rows.argsort()
