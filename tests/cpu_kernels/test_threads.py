"""Tests that torch is limited to one thread around kernels, only in the calling thread and only while kernels run."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bridle.cpu_kernels import threads
from bridle.cpu_kernels.threads import is_parallel, num_threads, torch_alone


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def has_openmp() -> bool:
    return hasattr(ctypes.CDLL(None), "omp_set_num_threads")


@pytest.mark.skipif(not has_openmp(), reason="torch has other threads here")
def test_torch_is_held_to_one_thread_and_kernels_are_not() -> None:
    with torch_alone():
        assert (torch.get_num_threads(), num_threads(), is_parallel()) == (1, 2, 1)
        with torch_alone():
            assert (torch.get_num_threads(), num_threads()) == (1, 2)
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
    assert (torch.get_num_threads(), num_threads()) == (2, 2)


def test_threads_that_begin_meanwhile_compute_with_all() -> None:
    with torch_alone(), ThreadPoolExecutor(1) as others:
        assert others.submit(torch.get_num_threads).result() == 2
        assert others.submit(num_threads).result() == 2


def test_an_error_gives_the_threads_back() -> None:
    with pytest.raises(RuntimeError, match="of the step"), torch_alone():
        raise RuntimeError("of the step")
    assert (torch.get_num_threads(), num_threads()) == (2, 2)


def test_where_one_thread_computes_nothing_is_parallel() -> None:
    torch.set_num_threads(1)
    with torch_alone():
        assert (num_threads(), is_parallel()) == (1, 0)


def test_without_openmp_torch_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_setter", lambda: None)
    with torch_alone():
        assert (torch.get_num_threads(), num_threads()) == (2, 2)
