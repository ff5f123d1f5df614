"""Stores token masks on a device, in a ring buffer of slots. A slot has one bit for each token of the vocabulary. Masks
that arrive during a forward pass are copied in parallel to the pass, on a separate stream. A mask is not copied if the
ring already has the same object or a mask with the same bits. Equal masks are common, for example if many rows have the
same constraint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from bridle.model.h2d_copies import pinned

#: Number of full steps whose masks the ring holds.
_STEPS = 4
_MIN_SLOTS = 64
#: Number of bytes of a mask that are sampled to find equal masks.
_SAMPLED = 64


class MaskRing:
    """The ring of slots. One thread calls `place`, launches kernels that read `masks`, and then calls `release`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.masks = torch.empty(1, 1, dtype=torch.int32, device=device)  # [slots, words]
        self._next = 0
        self._held: dict[int, bytes] = {}  # contents of each slot; keeps the object alive, so that its id is not reused
        self._by_id: dict[int, int] = {}
        self._by_sample: dict[bytes, int] = {}
        self._stream: torch.cuda.Stream | None = None
        self._released: torch.cuda.Event | None = None

    def place(self, masks: Sequence[bytes | None], vocab: int) -> list[int]:
        """Return the slot of each mask (-1 for None); copy masks that the ring does not have. Later launches on the
        current stream wait for the copies."""
        if all(mask is None for mask in masks):
            return [-1] * len(masks)
        self._make_room(len(masks), -(-vocab // 32))
        slots: list[int] = []
        fresh: list[bytes] = []
        for mask in masks:
            slot = -1 if mask is None else self._find(mask)
            if mask is not None and slot < 0:
                slot = self._next + len(fresh)
                self._note(mask, slot)
                fresh.append(mask)
            slots.append(slot)
        if fresh:
            self._copy(fresh)
        return slots

    def release(self) -> None:
        """Record that all kernels that read the masks were launched. Later writes to the slots of the placed masks wait
        for those kernels."""
        if self._device.type != "cpu":
            self._released = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._released.record(torch.cuda.current_stream(self._device))

    # -- slots -----------------------------------------------------------------------------------------------------

    def _make_room(self, number: int, num_words: int) -> None:
        """Free slots for `number` new masks by forgetting the masks in the next slots."""
        if self.masks.shape[0] < number * _STEPS or self.masks.shape[1] != num_words:
            num_slots = max(_MIN_SLOTS, number * _STEPS)
            self.masks = torch.empty(num_slots, num_words, dtype=torch.int32, device=self._device)
            self.release()  # earlier launches may still use this memory
            self._next = 0
            self._held.clear()
            self._by_id.clear()
            self._by_sample.clear()
        if self._next + number > self.masks.shape[0]:
            self._next = 0
        for slot in range(self._next, self._next + number):
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        mask = self._held.pop(slot, None)
        if mask is not None:
            del self._by_id[id(mask)]
            if self._by_sample.get(_sample(mask)) == slot:
                del self._by_sample[_sample(mask)]

    def _find(self, mask: bytes) -> int:
        """Return the slot of a mask; -1 if the ring does not have this mask."""
        slot = self._by_id.get(id(mask), -1)
        if slot < 0:
            slot = self._by_sample.get(_sample(mask), -1)
        return slot if slot >= 0 and self._held[slot] == mask else -1

    def _note(self, mask: bytes, slot: int) -> None:
        self._held[slot] = mask
        self._by_id[id(mask)] = slot
        self._by_sample[_sample(mask)] = slot

    # -- copies ----------------------------------------------------------------------------------------------------

    def _copy(self, fresh: Sequence[bytes]) -> None:
        """Copy new masks to the next slots, on the separate stream."""
        staged = pinned((len(fresh), self.masks.shape[1]), torch.int32, self._device)
        _write(fresh, staged.numpy())
        target = self.masks[self._next : self._next + len(fresh)]
        self._next += len(fresh)
        if self._device.type == "cpu":
            target.copy_(staged, non_blocking=True)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        if self._released is not None:
            self._stream.wait_event(self._released)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
        current.wait_stream(self._stream)


def _sample(mask: bytes) -> bytes:
    """Return some bytes spread over the whole mask, which are compared before whole masks are."""
    return mask[:: max(1, len(mask) // _SAMPLED)]


def _write(masks: Sequence[bytes], staged: npt.NDArray[np.int32]) -> None:
    """Write masks to `staged` as rows of words. Tokens beyond a mask's end are forbidden."""
    rows = staged.view(np.uint8)
    for row, mask in zip(rows, masks, strict=True):
        size = min(len(mask), len(row))
        row[:size] = np.frombuffer(mask, np.uint8, size)
        row[size:] = 0
