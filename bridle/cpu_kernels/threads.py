"""The number of compute threads, and a way to limit torch to one thread while the kernels compute. The OpenMP workers
of torch busy-wait for work for some milliseconds after each parallel operation. The thread pool of bridle's kernels
computes while these workers busy-wait. With as many threads as processors, a busy-waiting worker and a kernel thread
then share a processor. This sharing made a token of a 0.5B model take 18 ms instead of 12 ms. So torch is limited to
one thread while the kernels compute. The setting of torch itself applies to all threads of a process that have not
computed yet. This module therefore uses OpenMP's setting, which applies only to the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import local

import torch

_held = local()


def num_threads() -> int:
    """Return the number of compute threads that the calling thread uses, even while torch is limited to one thread."""
    found: int = getattr(_held, "threads", 0)
    return found or torch.get_num_threads()


def is_parallel() -> int:
    """Return 1 if the kernels may use several threads, else 0."""
    return int(num_threads() > 1)


@contextmanager
def torch_alone() -> Iterator[None]:
    """Limit torch's operations in the calling thread to one thread inside the `with` block, if the platform supports
    it. May be nested."""
    threads, set_threads = torch.get_num_threads(), _setter()
    if threads == 1 or set_threads is None:
        yield
        return
    _held.threads = threads
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)
        _held.threads = 0


@cache
def _setter() -> Callable[[int], None] | None:
    """Return OpenMP's function that sets the number of threads; None if torch uses other threads (on macOS or
    Windows)."""
    try:
        function = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes, function.restype = [ctypes.c_int], None
    threads = torch.get_num_threads()
    other = threads + 1
    function(other)
    is_torchs = torch.get_num_threads() == other
    function(threads)
    return function if is_torchs else None
