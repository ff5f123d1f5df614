"""Finds the largest values of wide rows, by the C kernels or in plain torch. To find the index of the largest of
150,000 values, torch takes several times as long as to find the value. The largest value of each chunk of columns is
therefore computed first, and indices are searched only in chunks that can contain them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from bridle.cpu_kernels.library import sampling_kernels
from bridle.model.sampling.rows import CHUNK

#: Number of values in a group of which the largest is found.
_PER_GROUP = 32
_Row = npt.NDArray[np.float32]
#: Rows with fewer chunks than this are searched directly.
_FEW = 16


def largest(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest value of each of `rows` [R, V] and the index of its first occurrence: both [R]. NaN counts as
    the largest value. If all values are -inf, the index is arbitrary."""
    found = sampling_kernels(rows)
    return _by_torch(rows) if found is None else found.largest(rows, range(len(rows)), [None] * len(rows))


def largest_allowed(
    logits: torch.Tensor, indices: Sequence[int], masks: Sequence[bytes | None]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the largest allowed value and its index for the rows `indices` of `logits` [R, V], each with its mask.
    Rows are not copied. Return None if no C kernel supports this."""
    found = sampling_kernels(logits)
    return None if found is None else found.largest(logits, indices, masks)


def _by_torch(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = rows.shape[1] // CHUNK * CHUNK
    if whole < _FEW * CHUNK:
        return tuple(rows.max(-1))  # type: ignore[return-value]
    chunked = _chunked(rows[:, :whole])
    best, chunk = chunked.amax(-1).max(-1)
    place = chunk * CHUNK + _chosen(chunked, chunk.unsqueeze(1)).argmax(1)
    if whole == rows.shape[1]:
        return best, place
    last, offset = rows[:, whole:].max(-1)
    is_last = (last > best) | (last.isnan() & ~best.isnan())
    return torch.where(is_last, last, best), torch.where(is_last, whole + offset, place)


def chunk_maxima(work: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each chunk of `work` [R, W]: [R, W / CHUNK]. W must be a multiple of `CHUNK`."""
    return _chunked(work).amax(-1)


def top(work: torch.Tensor, maxima: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `size` largest values of each row of `work` [R, W] and their indices [R, size]; `maxima` are its
    `chunk_maxima`."""
    if maxima.shape[1] < max(_FEW, 2 * size):
        return _top_of_narrow(work, size)
    chunks = maxima.topk(size, dim=1).indices  # each of the largest values is in one of these chunks
    values, found = _chosen(_chunked(work), chunks).topk(size, dim=1)
    return values, chunks.gather(1, found // CHUNK) * CHUNK + found % CHUNK


def _top_of_narrow(work: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as `top` for rows with few chunks. The columns form G groups: column j belongs to group j mod G.
    A group of columns with one of the largest values also has one of the largest maxima. So most columns are compared
    only once, with vector instructions."""
    num_groups = work.shape[1] // _PER_GROUP
    if num_groups < 4 * size:
        values, places = work.topk(size, dim=1)
        return values, places
    grouped = work.view(work.shape[0], _PER_GROUP, num_groups)
    groups = grouped.amax(1).topk(size, dim=1).indices  # [R, size]
    found = grouped.gather(2, groups.unsqueeze(1).expand(-1, _PER_GROUP, -1)).flatten(1)
    values, places = found.topk(size, dim=1)
    return values, places // size * num_groups + groups.gather(1, places % size)


def num_above(work: torch.Tensor, maxima: torch.Tensor, bound: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Return how many values in each row of `work` [R, W] are larger than the row's `bound` [R, 1]: int64 [R, 1].
    `maxima` are the `chunk_maxima` of `work`, and `best` [R, n] are the largest values of each row, in descending
    order. Rows whose bound is among the best values are not searched."""
    if work.device.type != "cpu":
        return count_above(work, bound)
    above = (best > bound).sum(1, keepdim=True)
    least = best[:, -1:] if best.shape[1] else torch.full_like(bound, torch.inf)
    rows, chunks, bounds, found = work.numpy(), maxima.numpy(), bound.numpy(), above.numpy()
    searched = np.flatnonzero(bounds < least.numpy())
    if len(searched) and chunks.shape[1] < _FEW:
        found[searched] = (rows[searched] > bounds[searched]).view(np.uint8).sum(1, dtype=np.uint32, keepdims=True)
        return above
    for i in searched:
        found[i] = _count_above(rows[i], chunks[i], bounds[i])
    return above


def _count_above(row: _Row, maxima: _Row, bound: _Row) -> int:
    """Return how many values of one wide row [W] are larger than `bound` [1]."""
    chunks = np.flatnonzero(maxima > bound)
    if len(chunks) * _FEW < len(maxima):  # the usual case for tokens that were probable
        row = row.reshape(-1, CHUNK)[chunks]
    return int(np.count_nonzero(row > bound))


def count_above(work: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return how many values in each row of `work` [R, W] are larger than `bound` [R, 1]: int64 [R, 1]."""
    if work.device.type != "cpu":
        return (work > bound).sum(1, keepdim=True)
    pairs = zip(work.numpy(), bound.numpy(), strict=True)  # numpy counts bits six times as fast
    return torch.tensor([[np.count_nonzero(row > least)] for row, least in pairs])


def _chunked(rows: torch.Tensor) -> torch.Tensor:
    """Return a view of `rows` [R, W] by chunks: [R, W / CHUNK, CHUNK]."""
    return rows.view(rows.shape[0], -1, CHUNK) if rows.is_contiguous() else torch.unflatten(rows, 1, (-1, CHUNK))


def _chosen(chunked: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """Return the values of `chunks` [R, n] of `chunked` [R, C, CHUNK], concatenated: [R, n * CHUNK]."""
    return chunked.gather(1, chunks.unsqueeze(2).expand(-1, -1, CHUNK)).flatten(1)
