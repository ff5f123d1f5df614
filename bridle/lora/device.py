"""Where adapters are kept and computed with: what a pool asks of an executor, in this process or another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from bridle.lora.files import AdapterFiles
from bridle.lora.layers import LayerShape


class AdapterDevice(Protocol):
    """Called from any thread; calls about one adapter come one after the other. All but `read_adapter` are quick. Each
    raises `ShardUnavailable` when the device is away."""

    @property
    def adapter_layers(self) -> Mapping[str, LayerShape]:
        """The layers that take adapters, by name; empty if none does."""
        raise NotImplementedError

    @property
    def adapter_epoch(self) -> int:
        """Another number whenever all that was read or placed is lost."""
        raise NotImplementedError

    def read_adapter(self, key: str, files: AdapterFiles) -> None:
        """From disk to the host's memory. Raises `AdapterRefused`."""

    def place_adapter(self, key: str) -> None:
        """From the host to where the model computes."""

    def displace_adapter(self, key: str) -> None:
        """Give up its place on the device. What is not there is ignored."""

    def drop_adapter(self, key: str) -> None:
        """Give up its place on the host. What is not there is ignored."""

    def drop_adapters(self) -> None:
        """Give up all of them, on both tiers."""


def as_device(executor: object) -> AdapterDevice | None:
    """`executor` as a device, if it applies adapters at all."""
    return cast(AdapterDevice, executor) if getattr(executor, "adapter_layers", None) else None
