"""Tests of memory on huge pages: tensors lie apart and begin at cache lines, and a region is freed with its last
tensor."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.cpu_kernels import huge_pages as module
from bridle.cpu_kernels.huge_pages import alloc_huge_pages

SIZES = st.lists(st.integers(0, 200_000), max_size=40)


@given(SIZES)
def test_tensors_lie_apart_and_begin_at_cache_lines(sizes: list[int]) -> None:
    tensors = [alloc_huge_pages(size) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.dtype is torch.uint8
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())


def test_a_large_tensor_has_a_region_of_its_own() -> None:
    large, small = alloc_huge_pages(40 << 20), alloc_huge_pages(100)
    large.fill_(1)
    small.fill_(2)
    assert int(large.view(torch.int64)[-1]) == 0x0101010101010101
    assert int(small.sum()) == 200


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no such pages here")
def test_a_region_goes_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "last", None)
    first, second = alloc_huge_pages(1000), alloc_huge_pages(1000)
    assert second.data_ptr() == first.data_ptr() + 1024  # side by side
    assert module.last is not None
    region = module.last
    assert region() is not None
    del first
    assert region() is not None
    second.fill_(7)
    del second
    assert region() is None


def test_a_kernel_without_large_pages_gives_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_region: mmap.mmap, _advice: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(module, "last", None)
    monkeypatch.setattr(module.Region, "madvise", refuse)
    tensor = alloc_huge_pages(1000)
    tensor.fill_(3)
    assert int(tensor.sum()) == 3000
