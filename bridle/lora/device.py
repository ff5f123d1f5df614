"""What an adapter pool asks of the executor that keeps adapters and computes with them, in this process or another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from bridle.lora.files import AdapterFiles
from bridle.lora.layers import LayerShape


class AdapterDevice(Protocol):
    """The methods may be called from any thread; calls about one adapter come one after the other. All but
    `read_adapter` are quick. Each raises `ShardUnavailable` when the device cannot be reached."""

    @property
    def adapter_layers(self) -> Mapping[str, LayerShape]:
        """The layers that take adapters, by name; empty if none does."""
        raise NotImplementedError

    @property
    def adapter_epoch(self) -> int:
        """A number that changes whenever the device loses everything that was read or placed."""
        raise NotImplementedError

    def read_adapter(self, key: str, files: AdapterFiles) -> None:
        """Read an adapter from disk to the host's memory. Raises `AdapterRefused`."""

    def place_adapter(self, key: str) -> None:
        """Copy an adapter from the host to the device where the model computes."""

    def displace_adapter(self, key: str) -> None:
        """Free the adapter's memory on the device. An adapter that is not there is ignored."""

    def drop_adapter(self, key: str) -> None:
        """Free the adapter's memory on the host. An adapter that is not there is ignored."""

    def drop_adapters(self) -> None:
        """Free all adapters, on the device and on the host."""


def as_device(executor: object) -> AdapterDevice | None:
    """Return `executor` as a device for adapters; None if it does not apply adapters."""
    return cast(AdapterDevice, executor) if getattr(executor, "adapter_layers", None) else None
