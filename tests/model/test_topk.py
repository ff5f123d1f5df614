"""Tests that the largest values, which are found by chunks of a row, equal those of torch's own reductions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.model.sampling.rows import CHUNK
from bridle.model.sampling.topk import chunk_maxima, largest, num_above, top

_VALUES = (0.0, -1.0, 1.0, 2.5, float("-inf"), float("inf"), float("nan"))


def rows(seed: int, num_rows: int, width: int, *, levels: int = 0) -> torch.Tensor:
    """Random rows; with `levels` they have few different values, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    if levels:
        return torch.randint(levels, (num_rows, width), generator=generator).float()
    return torch.randn(num_rows, width, generator=generator)


@given(
    seed=st.integers(0, 1 << 16),
    width=st.sampled_from([1, 255, CHUNK * 16, CHUNK * 17 + 3, CHUNK * 40 + 255]),
    levels=st.sampled_from([0, 2, 50]),
    odd=st.lists(st.tuples(st.integers(0, 1 << 16), st.sampled_from(_VALUES)), max_size=4),
)
def test_the_first_of_the_largest_is_found(seed: int, width: int, levels: int, odd: list[tuple[int, float]]) -> None:
    work = rows(seed, 3, width, levels=levels)
    for place, value in odd:
        work[place % 3, place % width] = value
    values, places = largest(work)
    wanted = work.max(-1)
    assert torch.equal(values, wanted.values) or values.isnan().equal(wanted.values.isnan())
    for row, value, place in zip(work, values, places, strict=True):
        if not value.isnan():
            assert place == (row == value).nonzero()[0]


@given(
    seed=st.integers(0, 1 << 16),
    num_chunks=st.sampled_from([1, 8, 16, 40, 80]),
    size=st.integers(1, 24),
    levels=st.sampled_from([0, 3, 1000]),
    num_forbidden=st.sampled_from([0, 100, CHUNK]),
)
def test_the_best_and_ranks_are_those_of_the_whole_row(
    seed: int, num_chunks: int, size: int, levels: int, num_forbidden: int
) -> None:
    work = rows(seed, 2, num_chunks * CHUNK, levels=levels)
    work[:, :num_forbidden] = float("-inf")
    maxima = chunk_maxima(work)
    values, places = top(work, maxima, size)
    assert torch.equal(values, work.topk(size, dim=1).values)
    assert torch.equal(work.gather(1, places), values)
    assert all(len(set(row)) == size for row in places.tolist())
    for bound in (values[:, :1], values[:, -1:], work[:, 7:8]):
        for known in (values, values[:, :0]):
            assert torch.equal(num_above(work, maxima, bound, known), (work > bound).sum(1, keepdim=True))


@pytest.mark.parametrize("width", [CHUNK * 2, CHUNK * 32, CHUNK * 32 + 9])
def test_rows_of_half_precision(width: int) -> None:
    work = rows(3, 4, width).bfloat16()
    values, places = largest(work)
    assert torch.equal(work.gather(1, places.unsqueeze(1)).squeeze(1), values)
    assert torch.equal(values, work.amax(1))
