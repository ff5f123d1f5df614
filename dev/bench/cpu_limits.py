"""The limits of a CPU's memory and arithmetic units, measured within the same minute as the figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.roofline import read_bandwidth

#: Bytes of a weight in each form; the head of a file may take more.
BYTES = {"float32": 4.0, "int8": 1.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "Q4_K_M": 0.6}


@dataclass(frozen=True, slots=True)
class CpuCase:
    """A measured case: `batch` sequences with prompts of `context` tokens. `kind` selects the measurement: decoding or
    prompts."""

    kind: str
    batch: int
    context: int


@dataclass(slots=True)
class CpuLimits:
    """Bytes and operations per second, each from the best measurement. An addition and a multiplication count as two
    operations."""

    bandwidth: float = 0.0
    operations: float = 0.0  # on 8-bit integers
    float_operations: float = 0.0

    def look(self) -> None:
        """Measure the limits again."""
        self.bandwidth = max(self.bandwidth, read_bandwidth(num_rounds=2))
        self.operations = max(self.operations, int8_operations())
        self.float_operations = max(self.float_operations, float_operations())

    def seconds(
        self, checkpoint: BenchCheckpoint, form: str, case: CpuCase, step_tokens: int, weight_bytes: float | None = None
    ) -> float:
        """Return the minimum time of one step that reads all weights once and computes `step_tokens` tokens. Without
        `weight_bytes`, all weights are assumed to be in the format `form`. The KV of the contexts counts as 32-bit
        values, although backends may store fewer bits."""
        weights = checkpoint.step_bytes / 4
        context = checkpoint.token_bytes * case.batch * case.context
        read = weights * BYTES[form] if weight_bytes is None else weight_bytes
        read = (read + (context if case.kind == "decode" else 0)) / self.bandwidth
        body = weights if case.kind == "decode" else weights - checkpoint.head_numbers
        rate = self.float_operations if form == "float32" else self.operations
        return max(read, 2 * body * step_tokens / rate)


def int8_operations(rows: int = 192, side: int = 1024, num_rounds: int = 8) -> float:
    """Return the operations per second of an 8-bit matrix product that fits into the caches, by bridle's kernels or by
    torch, whichever is faster."""
    import torch

    from bridle.model.quantize import Int8Linear, int8_ratio

    layer = torch.nn.Linear(side, side, bias=False).requires_grad_(False)
    forms = [Int8Linear(layer)]
    if int8_ratio() <= 1:  # otherwise torch multiplies 8-bit integers one by one
        forms.append(Int8Linear(layer, is_native=False))
    inputs = torch.ones(rows, side)
    return max(_rate(lambda form=form: form(inputs), rows, side, num_rounds) for form in forms)  # type: ignore[misc]


def float_operations(rows: int = 256, side: int = 1024, num_rounds: int = 4) -> float:
    """Return the operations per second of torch's float32 matrix product that fits into the caches."""
    import torch

    left, right = torch.ones(rows, side), torch.ones(side, side)
    return _rate(lambda: torch.mm(left, right), rows, side, num_rounds)


def _rate(product: Callable[[], object], rows: int, side: int, num_rounds: int) -> float:
    import torch

    best = float("inf")
    with torch.inference_mode():
        for _ in range(num_rounds):
            begin = time.perf_counter()
            product()
            best = min(best, time.perf_counter() - begin)
    return 2 * rows * side * side / best
