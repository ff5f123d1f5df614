"""Copies KV blocks and recurrent states between a GPU and bytes in host memory. The engine requests a copy of a KV
block before the block is reused. The block is first copied on the device, in the stream of the steps, and then
transferred to the host on a parallel stream. Data from the host is also written on a parallel stream. A write waits for
all steps that were started, and goes to blocks that no step reads. So no step waits for a transfer between host and
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bridle.lora.side_stream import SideStream
from bridle.model.h2d_copies import pinned
from bridle.model.kv_blocks import parts_of
from bridle.model.kv_cache import KVCache
from bridle.model.state_pool import StatePool


class DeviceCopy:
    """Implements `bridle.kv_store.Snapshot`: `row` is a copy of a KV block's bytes on the device, made in the stream of
    the steps."""

    def __init__(self, row: Tensor, beside: SideStream) -> None:
        self._row, self._beside = row, beside
        self._made = mark_steps(row.device)

    def copy_into(self, memory: memoryview) -> None:
        if not memory:
            return
        with torch.inference_mode(), self._beside.beside():
            wait_for(self._made)
            torch.frombuffer(memory, dtype=torch.uint8).copy_(self._row, non_blocking=True)


class DeviceBlocks:
    """Implements `bridle.engine.interfaces.DeviceKVBlocks` over the cache of a device. The bytes of a block have the
    same layout as those of `bridle.model.kv_blocks.CacheBlocks`."""

    def __init__(self, cache: KVCache, identity: Callable[[], str], states: StatePool | None = None) -> None:
        self.identity, self._device = identity, cache.device
        self._parts, self._states = parts_of(cache, states)
        self.block_bytes, self.state_bytes = (
            sum(part.shape[1] for part in parts) for parts in (self._parts, self._states)
        )
        self._reads, self._writes = SideStream(cache.device), SideStream(cache.device)

    def allocate_host(self, num_bytes: int) -> memoryview:
        memory: Any = pinned((num_bytes,), torch.uint8, self._device).numpy()  # an array is a buffer
        return memoryview(memory)

    def read_block(self, block: int) -> DeviceCopy:
        return self._copy(self._parts, block)

    def read_state(self, slot: int) -> DeviceCopy:
        return self._copy(self._states, slot)

    def write_block(self, block: int, data: memoryview) -> None:
        self._write(self._parts, block, data)

    def write_state(self, slot: int, data: memoryview) -> None:
        self._write(self._states, slot, data)

    def _copy(self, parts: Sequence[Tensor], number: int) -> DeviceCopy:
        with torch.inference_mode():
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            return DeviceCopy(torch.cat([part[number] for part in parts] or [empty]), self._reads)

    def _write(self, parts: Sequence[Tensor], number: int, data: memoryview) -> None:
        if not data:
            return
        with torch.inference_mode(), self._writes.beside():
            wait_for(mark_steps(self._device))
            row = torch.frombuffer(data, dtype=torch.uint8).to(self._device, non_blocking=True)
            sizes = [part.shape[1] for part in parts]
            torch._foreach_copy_([part[number] for part in parts], list(torch.split(row, sizes)))


def mark_steps(device: torch.device) -> torch.cuda.Event | None:
    """Return a CUDA event after all steps that were started; None for devices without asynchronous steps."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.default_stream(device))
    return event


def wait_for(event: torch.cuda.Event | None) -> None:
    """Let the current CUDA stream of this thread wait for the event."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
