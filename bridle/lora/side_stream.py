"""Runs GPU work in parallel to steps, such as copies and self-tests that no step waits for. This work runs on a
separate CUDA stream, and allocates memory from that stream's pool. Steps read the work's results on their own stream.
So each result must be passed to `used_by_steps`. Without `used_by_steps`, the pool would reuse a result's memory while
a step still reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A CUDA stream of `device` for work in parallel to its steps. On a CPU there is no stream, and the methods do
    nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside the `with` block, this thread's device work runs concurrently with steps. The `with` block ends when
        this device work is complete."""
        if self._device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def used_by_steps(tensor: Tensor) -> Tensor:
    """Return `tensor`, and prevent reuse of its memory until all steps started so far are done."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.default_stream(tensor.device))
    return tensor
