"""Asynchronous copies between host and device. A copy from ordinary memory blocks the host until the GPU executes it. A
copy from pinned memory is queued like a kernel launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Sections of an upload begin at multiples of 16 bytes. For other pointers Triton would compile a kernel once more, in
#: the middle of serving.
ALIGNMENT = 16


def aligned(count: int, item_size: int) -> int:
    """Return a number of items rounded up so that they fill whole units of 16 bytes."""
    each = ALIGNMENT // item_size
    return -(-count // each) * each


def in_sections(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Copy arrays of one type into one array, each at an aligned offset."""
    dtype = parts[0].dtype
    whole = np.zeros(sum(aligned(part.size, dtype.itemsize) for part in parts), dtype)
    start = 0
    for part in parts:
        whole[start : start + part.size] = part.ravel()
        start += aligned(part.size, dtype.itemsize)
    return whole


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return a copy of the array on `device`. Work that is launched later on the device sees the values. On a CPU the
    tensor may share the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_list(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a list of values as a tensor on `device`, without waiting for the device."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory of the host that `device` can copy from and to asynchronously; for a CPU, ordinary
    memory."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


class Download:
    """A copy of values from a device to the host. The host waits only when `wait` is called."""

    def __init__(self, source: Tensor) -> None:
        self._host, self._event = source, None
        if source.device.type == "cpu":
            return
        self._host = pinned(source.shape, source.dtype, source.device)
        self._host.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(source.device))

    def wait(self) -> Tensor:
        """Wait for the copy, and return the values in the host's memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Staging:
    """Two pinned buffers for copies to `target`, a tensor at a fixed address of a device. The host writes one buffer
    while the device may still read the other."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._hosts = [pinned(target.shape, target.dtype, target.device) for _ in range(2)]
        self._events: list[Any] = [None, None]
        self._turn = 0

    def take(self) -> npt.NDArray[Any]:
        """Return the buffer to write next, with its previous contents. This method waits for the device if both buffers
        are still in use."""
        self._turn = 1 - self._turn
        event = self._events[self._turn]
        if event is not None and not event.query():
            event.synchronize()
        numbers: npt.NDArray[Any] = self._hosts[self._turn].numpy()
        return numbers

    def send(self, count: int) -> None:
        """Copy to the device the first `count` values of the buffer that `take` returned last."""
        self._target[:count].copy_(self._hosts[self._turn][:count], non_blocking=True)
        if self._target.device.type != "cpu":
            event = self._events[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._target.device))
