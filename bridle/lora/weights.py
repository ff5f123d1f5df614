"""Reads an adapter's weights, checks that the files did not change since their inspection, and packs the weights for
the device."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from bridle.errors import AdapterRefused
from bridle.lora.files import AdapterFiles, read_adapter
from bridle.lora.layout import AdapterBlock, AdapterLayout, AdapterPlacement
from bridle.lora.tensors import names_of

_serials = count(1)


class HostAdapter:
    """An adapter in host memory: A [rank, in] and B [out, rank] of each layer, in the type that the file has."""

    def __init__(self, files: AdapterFiles, tensors: dict[str, Tensor]) -> None:
        self.files = files
        self._tensors = tensors

    def pair(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a layer."""
        first, second = names_of(layer)
        return self._tensors[first], self._tensors[second]


def read_weights(files: AdapterFiles) -> HostAdapter:
    """Read the weights. Raises `AdapterRefused` if the bytes differ from the inspected ones, or if a value is not
    finite."""
    now, data = read_adapter(files.folder, files.root)
    if now.digest != files.digest:
        raise AdapterRefused(
            "the adapter's files have changed since it was added; remove it and add it again", "source"
        )
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise AdapterRefused(f"the adapter's weights are damaged: {error}", "source") from None
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterRefused(f"tensor {name!r} holds values that are not finite", "source")
    return HostAdapter(now, tensors)


class PlacedAdapter:
    """An adapter on the model's device: one flat tensor, and views of its matrices by site."""

    def __init__(self, layout: AdapterLayout, flat: Tensor) -> None:
        self.serial = next(_serials)
        self.layout = layout
        self.flat = flat  # [layout.num_values]
        self.sites = {site: SiteWeights(block, flat) for site, block in layout.blocks.items()}


class SiteWeights:
    """The matrices of one site, transposed for `rows @ matrix`: `first` [in, rank], and the B [ranks, columns] of each
    part. If `flat` has a leading dimension of adapters, the matrices have this dimension, too."""

    def __init__(self, block: AdapterBlock, flat: Tensor) -> None:
        self.block = block
        lead = flat.shape[:-1]
        first = flat[..., block.begin : block.begin + block.rank * block.num_inputs]
        self.first = first.view(*lead, block.rank, block.num_inputs).transpose(-1, -2)
        self.seconds: list[Tensor] = []
        for part in block.parts:
            size = part.columns.size * part.ranks.size
            second = flat[..., part.begin : part.begin + size]
            self.seconds.append(second.view(*lead, part.columns.size, part.ranks.size).transpose(-1, -2))


def place(
    adapter: HostAdapter,
    layout: AdapterLayout,
    places: Mapping[str, AdapterPlacement],
    dtype: torch.dtype,
    device: torch.device,
) -> PlacedAdapter:
    """Pack an adapter into a flat tensor on the device, with each B multiplied by its scale. Raises `AdapterRefused` if
    a value overflows the model's type."""
    packed = torch.zeros(layout.num_values, dtype=dtype, pin_memory=device.type == "cuda")
    for block in layout.blocks.values():
        weights = SiteWeights(block, packed)
        for part, second in zip(block.parts, weights.seconds, strict=True):
            where, shape = places[part.layer], adapter.files.shapes[part.layer]
            a, b = adapter.pair(part.layer)
            ranks = slice(part.ranks.begin, part.ranks.begin + shape.rank)
            weights.first[:, ranks].copy_(a[:, slice(*where.inputs)].t())
            second[: shape.rank].copy_((b[slice(*where.outputs)].float() * shape.scale).t())
    if dtype is torch.float16 and not bool(torch.isfinite(packed).all()):
        raise AdapterRefused(
            "the adapter has values that float16 cannot represent; serve the model in bfloat16", "source"
        )
    return PlacedAdapter(layout, packed.to(device))
