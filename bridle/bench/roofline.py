"""The measured memory bandwidth of the device, which limits decoding at small batches.

A decoding step reads every weight once. If the weights do not fit into the caches, a step takes at least the bytes of
the weights divided by the bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BYTES = 1 << 29  # much more than fits into the caches


def read_bandwidth(*, num_rounds: int = 5, num_bytes: int = _BYTES) -> float:
    """Return the bytes per second when all threads of the device read a large array: the best of `num_rounds`
    rounds."""
    import torch

    rows, device = 1 << 14, bench_device()
    matrix = torch.ones(rows, num_bytes // 4 // rows, device=device)
    vector = torch.ones(matrix.shape[1], device=device)
    seconds = min(_best(lambda: torch.mv(matrix, vector), num_rounds), _best(matrix.sum, num_rounds))
    return matrix.numel() * matrix.element_size() / seconds


def triad_bandwidth(*, num_rounds: int = 5, num_bytes: int = _BYTES) -> float:
    """Return the bytes per second of STREAM's triad, a = b + s * c, counting two reads and one write."""
    import torch

    b, c = (torch.ones(num_bytes // 4, device=bench_device()) for _ in range(2))
    a = torch.empty_like(b)
    seconds = _best(lambda: torch.add(b, c, alpha=3.0, out=a), num_rounds)
    return 3 * a.numel() * a.element_size() / seconds


def _best(work: Callable[[], object], num_rounds: int) -> float:
    times = []
    for _ in range(num_rounds):
        wait_for_device()
        begin = time.perf_counter()
        work()
        wait_for_device()
        times.append(time.perf_counter() - begin)
    return min(times)


def bench_device() -> torch.device:
    """Return the device on which models compute: CUDA if available, else the CPU."""
    from bridle.model.device_defaults import choose_device

    return choose_device("auto")


def wait_for_device() -> None:
    """Wait until a GPU has finished all launched work, so that a clock can measure it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def loop_rate(*, num_rounds: int = 3, length: int = 1 << 18) -> float:
    """Return the iterations of a Python loop per second: the best of `num_rounds` rounds."""

    def count() -> None:
        number = 0
        for each in range(length):
            number += each & 3

    return length / _best(count, num_rounds)


def product_rate(*, num_rounds: int = 3, side: int = 768) -> float:
    """Return the multiply-adds per second of a matrix product, with all threads of the device: the best of `num_rounds`
    rounds."""
    import torch

    matrix = torch.ones(side, side, device=bench_device())
    return side**3 / _best(lambda: torch.mm(matrix, matrix), num_rounds)
