"""GPU work in parallel to steps: copies and trials that no step waits for.

Memory that such work fills comes from its stream's own pool. Steps read this memory on another stream. Steps must
report the use (`used_by_steps`), because otherwise the pool would give the memory to the next copy while a step still
reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream of `device` for work in parallel to its steps; on a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run this thread's device work inside the block concurrently with steps, and finish it at the end of the
        block."""
        if self._device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def used_by_steps(tensor: Tensor) -> Tensor:
    """Return `tensor`, and keep its memory from being reused until the steps that were started are done."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.default_stream(tensor.device))
    return tensor
