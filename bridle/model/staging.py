"""Copies weights to a GPU through a ring of pinned buffers, so that one buffer is copied while the next one is filled.
A copy from ordinary memory would go through a small buffer of the driver, and the host would wait for it. The ring has
a fixed size, so loading weights of any size uses the same amount of pinned memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bridle.model.h2d_copies import pinned

_log = logging.getLogger(__name__)

#: Large enough that starting a copy costs little; enough buffers that the device always has one to copy.
BUFFER_BYTES, NUM_BUFFERS = 16 << 20, 4
#: Alignment of the start of a piece in a buffer, so that values of every type are aligned.
_ALIGNMENT = 64

#: Returns a copy of a tensor on a device.
Put = Callable[[Tensor], Tensor]


class Mark(Protocol):
    """Interface of a point in a device's queue of operations."""

    def synchronize(self) -> Any:
        """Wait until the device has reached this point."""


class Queue(Protocol):
    """Interface of a queue of operations that a device executes in order."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy from pinned memory `source` to `target`. `source` must not change until a later mark is
        reached."""

    def mark(self) -> Mark:
        """Return a mark that the device reaches after all copies queued so far."""


class StreamQueue:
    """Implements `Queue` by the current CUDA stream. Work that is launched on this stream later sees the copied
    weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class Stager:
    """Copies tensors to one device, through `num_buffers` pinned buffers of `buffer_bytes`. A buffer is reused when the
    device has reached the mark after the buffer's last copy."""

    def __init__(
        self, device: torch.device, queue: Queue, *, buffer_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS
    ) -> None:
        self._device, self._queue = device, queue
        self._buffers = [pinned((buffer_bytes,), torch.uint8, device) for _ in range(num_buffers)]
        self._marks: list[Mark | None] = [None] * num_buffers
        self._number, self._used = 0, 0  # index of the current buffer, and the number of its bytes that are written

    def put(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device, and return the copy for later work on the device. The original may be freed at
        once."""
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return tensor.to(self._device)
        source = tensor.detach().contiguous()
        made = torch.empty_like(source, device=self._device)
        there, here = (each.view(-1).view(torch.uint8) for each in (made, source))
        done = 0
        while done < here.numel():
            room = self._room()
            piece = room[: here.numel() - done].copy_(here[done : done + room.numel()])
            self._queue.copy(there[done : done + piece.numel()], piece)
            self._used += piece.numel()
            done += piece.numel()
        return made

    def finish(self) -> None:
        """Wait for all copies."""
        self._marks[self._number] = self._queue.mark()
        for mark in self._marks:
            if mark is not None:
                mark.synchronize()

    def _room(self) -> Tensor:
        """Return the free part of the current buffer. If the current buffer is full, return the next buffer."""
        self._used = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if self._used >= self._buffers[self._number].numel():
            self._turn()
        return self._buffers[self._number][self._used :]

    def _turn(self) -> None:
        self._marks[self._number] = self._queue.mark()
        self._number, self._used = (self._number + 1) % len(self._buffers), 0
        mark = self._marks[self._number]
        if mark is not None:
            mark.synchronize()


@contextmanager
def staged(device: torch.device) -> Iterator[Put]:
    """Yield a function that copies a tensor to `device`. All copies are complete when the block ends."""
    stager = None if device.type == "cpu" else _try_stager(device)
    if stager is None:
        yield lambda tensor: tensor.to(device)
        return
    yield stager.put
    stager.finish()


def move_model(model: nn.Module, device: torch.device, progress: Callable[[float], None] = lambda share: None) -> Any:
    """Move `model` to `device`, and return it. If the weights must be copied, `progress` gets the share of copied
    bytes."""
    if device.type == "cpu":
        return model.to(device)
    total = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) or 1
    done = 0
    with staged(device) as put:

        def moved(tensor: Tensor) -> Tensor:
            nonlocal done
            if tensor.device.type == "cpu":
                done += tensor.nbytes
                tensor = put(tensor)
                progress(min(done / total, 1.0))
            return tensor

        return model._apply(moved)  # type: ignore[no-untyped-call]


def _try_stager(device: torch.device) -> Stager | None:
    """Return a stager, or None if memory cannot be pinned, which is logged."""
    try:
        return Stager(device, StreamQueue(device))
    except RuntimeError as error:
        _log.warning("weights are copied to %s from pageable memory, because pinning memory failed: %s", device, error)
        return None
