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

#: Sections of an upload begin at multiples of so many bytes: Triton compiles a kernel once more for pointers that do
#: not, in the middle of serving.
ALIGNMENT = 16


def aligned(count: int, item_size: int) -> int:
    """Return `count` with the items that fill up its last 16 bytes."""
    each = ALIGNMENT // item_size
    return -(-count // each) * each


def in_sections(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Arrays of one type, one behind the other, each at an aligned place."""
    dtype = parts[0].dtype
    whole = np.zeros(sum(aligned(part.size, dtype.itemsize) for part in parts), dtype)
    start = 0
    for part in parts:
        whole[start : start + part.size] = part.ravel()
        start += aligned(part.size, dtype.itemsize)
    return whole


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


class Staging:
    """Pinned memory through which numbers come to `target`, a tensor at a fixed place of a device. There are two of
    it: the host writes one while the device may still read the other."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._hosts = [pinned(target.shape, target.dtype, target.device) for _ in range(2)]
        self._events: list[Any] = [None, None]
        self._turn = 0

    def take(self) -> npt.NDArray[Any]:
        """The memory to write next, with its previous contents. It is waited for where two steps are under way
        already."""
        self._turn = 1 - self._turn
        event = self._events[self._turn]
        if event is not None and not event.query():
            event.synchronize()
        numbers: npt.NDArray[Any] = self._hosts[self._turn].numpy()
        return numbers

    def send(self, count: int) -> None:
        """Copy the first `count` numbers of the memory that was taken last."""
        self._target[:count].copy_(self._hosts[self._turn][:count], non_blocking=True)
        if self._target.device.type != "cpu":
            event = self._events[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._target.device))
