"""Tests that `PaddedVocab` behaves like a set of ids, however it was created."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.control.decision import mask_of
from bridle.engine.sampling.padded_vocab import PaddedVocab

VOCAB = 70
IDS = st.sets(st.integers(0, VOCAB - 1))


@given(IDS, st.integers(1, VOCAB), st.integers(0, VOCAB))
def test_it_is_a_set(ids: set[int], size: int, known: int) -> None:
    unnamed = PaddedVocab.of(ids)
    assert list(unnamed) == sorted(ids)
    assert [token in unnamed for token in range(-1, VOCAB + 1)] == [token in ids for token in range(-1, VOCAB + 1)]
    assert bool(unnamed) == bool(ids)
    assert unnamed.end == max(ids, default=-1) + 1
    assert PaddedVocab.from_bounds(unnamed.bounds) == unnamed
    assert unnamed.among([3, 9, -1, 9, VOCAB]) == ids & {3, 9}
    known = min(known, size)
    assert set(unnamed.resized(size, known)) == {t for t in range(size) if t in ids or t >= known}
    named = [token for token in range(VOCAB) if token not in ids]
    if ids and max(ids) == VOCAB - 1:
        assert unnamed.end_of(VOCAB) == max(named, default=-1) + 1
    else:
        assert unnamed.end_of(VOCAB) == VOCAB


@given(IDS, IDS, st.integers(1, VOCAB))
def test_a_mask_is_barred_that_allows_no_named_id(ids: set[int], allowed: set[int], size: int) -> None:
    assert PaddedVocab.of(ids).bar(mask_of(allowed, VOCAB), size) == {t for t in allowed if t < size}.issubset(ids)


@pytest.mark.parametrize("bounds", [(1,), (2, 2), (3, 1), (1, 4, 4, 6), (1, 4, 2, 6)])
def test_what_is_no_spans_is_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not pairs of bounds"):
        PaddedVocab.from_bounds(bounds)
