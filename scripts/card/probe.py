"""Measured limits of a device: speed of copies and matrix products, and the time of a kernel launch. Figures of the
same run are compared with these limits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from bridle.bench.roofline import wait_for_device

_LAUNCHES = 200


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes that a copy reads and writes per second, and multiplications and additions per second in the model's number
    type."""

    copy_bytes: float
    products: float


def probe(device: torch.device, dtype: torch.dtype, *, quick: bool) -> tuple[Rates, dict[str, Any]]:
    """Return the limits, and a description of the device for the report."""
    size, side = ((1 << 24, 256), (4 << 30, 8192))[not quick]
    rates = Rates(_copy_rate(device, size), _product_rate(device, dtype, side))
    told: dict[str, Any] = {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_per_second": rates.copy_bytes,
        "products_per_second": rates.products,
        "launch_us": 1e6 * _launch_seconds(device),
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        told |= {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory": found.total_memory,
            "cuda": torch.version.cuda,
            "graph_launch_us": 1e6 * _graph_seconds(device),
        }
    try:
        import triton

        told["triton"] = triton.__version__
    except ImportError:
        told["triton"] = None
    return rates, told


def best_seconds(work: Any, num_rounds: int = 5) -> float:
    """Return the seconds of the fastest of some rounds, after a warm-up round."""
    work()
    times = []
    for _ in range(num_rounds):
        wait_for_device()
        begin = time.perf_counter()
        work()
        wait_for_device()
        times.append(time.perf_counter() - begin)
    return min(times)


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / best_seconds(lambda: target.copy_(source))


def _product_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    matrix = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(matrix)
    return 2 * side**3 / best_seconds(lambda: torch.mm(matrix, matrix, out=out))


def _launch_seconds(device: torch.device) -> float:
    """Return the seconds of one small operation that the host launches."""
    tensor = torch.zeros(16, device=device)

    def issue() -> None:
        for _ in range(_LAUNCHES):
            tensor.add_(1.0)

    return best_seconds(issue) / _LAUNCHES


def _graph_seconds(device: torch.device) -> float:
    """Return the seconds of one replayed CUDA graph that has one small operation."""
    tensor = torch.zeros(16, device=device)
    tensor.add_(1.0)
    wait_for_device()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1.0)

    def replay() -> None:
        for _ in range(_LAUNCHES):
            graph.replay()

    return best_seconds(replay) / _LAUNCHES
