"""Limits on a model's adapters, as plain data, and the interface of the device that holds the adapters. The device may
be in this process or in another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bridle.errors import AdapterRefused, UnsupportedFeature
from bridle.lora.files import AdapterFiles
from bridle.lora.layout import padded

_MAX_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A linear layer of the model. `is_transposed` means that the model family stores the layer's weight as [in,
    out]."""

    in_features: int
    out_features: int
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits on the adapters of a model. `layers` are the layers that adapters may change, by name, and `item_size` is
    the bytes of one value. The adapters on the host and the adapters on the device each have a limit in bytes."""

    layers: Mapping[str, LayerShape]
    item_size: int
    device_memory: int
    host_memory: int

    def device_bytes(self, files: AdapterFiles) -> int:
        """Return the bytes that an adapter takes on the device, where its ranks are padded."""
        sides = [padded(shape.rank) * (shape.in_features + shape.out_features) for shape in files.shapes.values()]
        return self.item_size * sum(sides)

    def check(self, files: AdapterFiles) -> None:
        """Raise `AdapterRefused` if the files are not for this model, or exceed the memory for adapters."""
        check_fits(files, self.layers)
        for what, size, limit in (
            ("the device", self.device_bytes(files), self.device_memory),
            ("the host", files.num_bytes, self.host_memory),
        ):
            if size > limit:
                raise AdapterRefused(f"the adapter needs {size} bytes on {what}; adapters may use {limit}", "source")


def check_fits(files: AdapterFiles, layers: Mapping[str, LayerShape]) -> None:
    """Raise `AdapterRefused` if the adapter changes a layer that the model lacks, or that has other sizes in the model.
    The error's message names the layer."""
    for name, shape in files.shapes.items():
        layer = layers.get(name)
        shown = repr(name if len(name) <= _MAX_SHOWN_CHARS else name[:_MAX_SHOWN_CHARS] + "...")
        if layer is None:
            raise AdapterRefused(
                f"the adapter changes layer {shown}; it may change only linear layers of attention and dense MLPs",
                "source",
            )
        if (shape.in_features, shape.out_features) != (layer.in_features, layer.out_features):
            raise AdapterRefused(
                f"the adapter is made for a layer {shown} from {shape.in_features} to {shape.out_features} features; "
                f"this model's goes from {layer.in_features} to {layer.out_features}",
                "source",
            )
        if files.config.is_transposed != layer.is_transposed:
            raise AdapterRefused(
                f"fan_in_fan_out is {files.config.is_transposed}; layer {shown} of this model needs "
                f"{layer.is_transposed}",
                "source",
            )


class AdapterDevice(Protocol):
    """Interface of an executor's `adapters`. Any thread may call the methods, but never two at once for the same
    adapter. All methods but `read` are quick. Each method raises `ShardUnavailable` if the device cannot be reached."""

    @property
    def layers(self) -> Mapping[str, LayerShape]:
        """Return the layers that support adapters, by name; empty if no layer does."""

    @property
    def epoch(self) -> int:
        """Return a number that changes whenever the device loses all adapters, including those in host memory."""

    def read(self, key: str, files: AdapterFiles) -> None:
        """Read an adapter from disk to the host's memory. Raises `AdapterRefused`."""

    def place(self, key: str) -> None:
        """Copy an adapter from host memory to the device that runs the model."""

    def displace(self, key: str) -> None:
        """Free the adapter's memory on the device. An adapter that is not on the device is ignored."""

    def drop(self, key: str) -> None:
        """Free the adapter's memory on the host. An adapter that is not on the host is ignored."""

    def clear(self) -> None:
        """Free all adapters, on the device and on the host."""


def find_device(executor: object) -> AdapterDevice | None:
    """Return the adapter device of `executor`; None if the executor does not support adapters."""
    device: AdapterDevice | None = getattr(executor, "adapters", None)
    return device if device is not None and device.layers else None


def require_device(executor: object) -> AdapterDevice:
    """Return the adapter device of `executor`. Raises `UnsupportedFeature` if the executor does not support
    adapters."""
    device = find_device(executor)
    if device is None:
        raise UnsupportedFeature("adapter: this backend does not support adapters", "adapter")
    return device
