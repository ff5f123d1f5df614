"""Counts the memory of all models of a server and divides it among them. This module does not load or close models."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bridle.config import ModelConfig
from bridle.errors import UnsupportedModel
from bridle.serving.models.model_slot import Slot

#: The smallest useful KV cache is the weights' size divided by this.
_LEAST_KV = 4


class Needs(NamedTuple):
    """The memory in bytes that a model takes in addition to its KV cache. `adapters` is the memory reserved for
    adapters that may be loaded later."""

    weights: int
    adapters: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.adapters


class ModelMemory:
    """A limit in bytes (None: no limit), and the slots that count against it."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.slots: list[Slot] = []  # slots that take memory, or for which memory is reserved
        self.closing = 0  # bytes of models that are being closed

    @property
    def used(self) -> int:
        """Return the bytes that all models take, including models that are being loaded or closed."""
        return self.closing + sum(slot.num_bytes for slot in self.slots)

    @property
    def left(self) -> int:
        """Return the number of free bytes if there is a limit, else 0."""
        return 0 if self.max_bytes is None else self.max_bytes - self.used

    def has(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` are free."""
        return self.max_bytes is None or self.left >= num_bytes

    def check_possible(self, names: str, needed: int, adapters: int = 0) -> None:
        """Raise `UnsupportedModel` for models that would not fit even if all models that may be closed were closed.
        `adapters` is the part of the `needed` bytes that is for adapters."""
        if self.max_bytes is None:
            return
        pinned = sum(slot.num_bytes for slot in self.slots if slot.is_pinned)
        if needed > self.max_bytes - pinned:
            taken = f", of which {_show(pinned)} are permanently in use" if pinned else ""
            raise UnsupportedModel(
                f"{names} needs {_show(needed)} with the smallest possible KV cache{_also(adapters)}; all models "
                f"together may take {_show(self.max_bytes)}{taken}; raise --max-model-memory{_or_lower(adapters)}"
            )

    def reserve(self, slot: Slot, num_bytes: int) -> None:
        """Count `num_bytes` for a slot from now on."""
        slot.num_bytes = num_bytes
        if slot not in self.slots:
            self.slots.append(slot)

    def release(self, slot: Slot) -> int:
        """Stop counting a slot. Returns the number of bytes that were counted for the slot before."""
        num_bytes, slot.num_bytes = slot.num_bytes, 0
        if slot in self.slots:
            self.slots.remove(slot)
        return num_bytes

    def oldest_idle(self) -> Slot | None:
        """Return the least recently used idle model; None if all models are in use."""
        return min((slot for slot in self.slots if slot.is_idle), key=lambda slot: slot.last_used, default=None)


def least_bytes(config: ModelConfig, needs: Needs) -> int:
    """Return the minimum memory of a model. The minimum consists of the weights, the room for adapters, and a KV cache.
    The KV cache has the requested size, or else a reasonable size."""
    return needs.total + (needs.weights // _LEAST_KV if config.kv_memory is None else config.kv_memory)


def with_kv(config: ModelConfig, weights: int, share: int) -> ModelConfig:
    """Return the configuration with at most `share` bytes for its KV cache, unless the configuration sets the size
    itself."""
    return replace(config, max_kv_memory=max(share, weights // _LEAST_KV, 1))


def _also(adapters: int) -> str:
    return f" and {_show(adapters)} for adapters" if adapters else ""


def _or_lower(adapters: int) -> str:
    return ", or lower --adapter-memory and --adapter-host-memory" if adapters else ""


def _show(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB" if num_bytes < 1 << 30 else f"{num_bytes / (1 << 30):.1f} GiB"
