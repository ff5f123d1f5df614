"""Numbers on their way to a device and back, such that the host does not wait for it.

A copy from ordinary memory waits until the GPU has come to it; one from pinned memory is a command like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`, which has it when it comes to use it; on a CPU it may be the same memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_list(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Plain numbers, likewise."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host, unwritten, that `device` copies from and to by itself; for a CPU any memory."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


class Download:
    """Numbers on their way from a device. Nobody waits before `wait` is called."""

    def __init__(self, source: Tensor) -> None:
        self._host, self._event = source, None
        if source.device.type == "cpu":
            return
        self._host = pinned(source.shape, source.dtype, source.device)
        self._host.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(source.device))

    def wait(self) -> Tensor:
        """The numbers, in the host's memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
