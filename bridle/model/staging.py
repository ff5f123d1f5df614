"""Copies weights to a GPU through a ring of pinned buffers, so that one buffer is copied while the next is read. The
driver makes a copy from ordinary memory through its own small buffer, and the host waits for each such copy.

Loading a model uses no other pinned memory than this ring, for weights of any size.
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
    """A point in a device's queue."""

    def synchronize(self) -> Any:
        """Wait until the device has reached this point."""


class Queue(Protocol):
    """Queue of operations that a device executes in order."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy pinned `source`, which must not change until a mark set later is reached."""

    def mark(self) -> Mark:
        """Return the point after all copies so far."""


class StreamQueue:
    """The current stream of a GPU. Work that is launched later on the stream sees the weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class Stager:
    """Copies tensors to one device, through `num_buffers` pinned buffers of `buffer_bytes`. A buffer is written again
    when the device has reached the mark after its last copy."""

    def __init__(
        self, device: torch.device, queue: Queue, *, buffer_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS
    ) -> None:
        self._device, self._queue = device, queue
        self._buffers = [pinned((buffer_bytes,), torch.uint8, device) for _ in range(num_buffers)]
        self._marks: list[Mark | None] = [None] * num_buffers
        self._number, self._used = 0, 0  # index of the current buffer, and the number of its bytes that are written

    def put(self, tensor: Tensor) -> Tensor:
        """Return the same values on the device, for work launched later; `tensor` itself may be freed."""
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
        """Return the free part of the current buffer, or of the next buffer if the current one is full."""
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
    """Yield a function that copies tensors to `device`; all copies are finished when the block ends."""
    stager = None if device.type == "cpu" else _try_stager(device)
    if stager is None:
        yield lambda tensor: tensor.to(device)
        return
    yield stager.put
    stager.finish()


def move_model(model: nn.Module, device: torch.device, progress: Callable[[float], None] = lambda share: None) -> Any:
    """Move `model` to `device`, and return it. `progress` gets the share of bytes that were copied, if copies are
    needed."""
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
        _log.warning("weights are copied to %s from pageable memory; pinning failed: %s", device, error)
        return None
