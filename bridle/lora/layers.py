"""Which layers of a model take adapters, as plain data, and whether an adapter's files fit them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridle.errors import AdapterRefused
from bridle.lora.files import AdapterFiles
from bridle.lora.layout import padded

_MAX_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A linear layer of the model. `is_transposed`: the family keeps its weights as [in, out]."""

    in_features: int
    out_features: int
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What adapters a model takes: its layers by name, the bytes of one of its numbers, and the bytes that all adapters
    together may take on the host and on the device."""

    layers: Mapping[str, LayerShape]
    item_size: int
    device_memory: int
    host_memory: int

    def device_bytes(self, files: AdapterFiles) -> int:
        """The bytes that an adapter takes on the device, where its ranks are padded."""
        sides = [padded(shape.rank) * (shape.in_features + shape.out_features) for shape in files.shapes.values()]
        return self.item_size * sum(sides)

    def check(self, files: AdapterFiles) -> None:
        """Raise `AdapterRefused` if the files are not for this model, or need more memory than there is."""
        check_fits(files, self.layers)
        for what, size, limit in (
            ("the device", self.device_bytes(files), self.device_memory),
            ("the host", files.num_bytes, self.host_memory),
        ):
            if size > limit:
                raise AdapterRefused(f"the adapter needs {size} bytes on {what}; adapters may take {limit}", "source")


def check_fits(files: AdapterFiles, layers: Mapping[str, LayerShape]) -> None:
    """Raise `AdapterRefused`, naming the layer, if the model lacks a layer of the adapter or has it in another size."""
    for name, shape in files.shapes.items():
        layer = layers.get(name)
        shown = repr(name if len(name) <= _MAX_SHOWN_CHARS else name[:_MAX_SHOWN_CHARS] + "...")
        if layer is None:
            raise AdapterRefused(
                f"the adapter changes layer {shown}, which is no linear layer of this model's attention or dense MLP",
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
