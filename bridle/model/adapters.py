"""The LoRA adapters of a model in this process: reads them to host memory, copies them to the device, and applies them
in steps. The caller decides which adapters are on the host and on the device. Other threads may read and copy adapters
while the model computes steps. An adapter that a step has begun to use stays alive until the step is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.errors import InternalError
from bridle.lora import AdapterFiles, LayerShape
from bridle.lora.adapter_kernel import TriedKernel
from bridle.lora.layout import RANK_STEP, AdapterLayout, LayoutCache, make_layout
from bridle.lora.ops import AdapterKernel, AdapterStep, Segment
from bridle.lora.peft_config import LoraShape
from bridle.lora.side_stream import SideStream, used_by_steps
from bridle.lora.torch_ops import TorchKernel
from bridle.lora.weights import HostAdapter, PlacedAdapter, place, read_weights
from bridle.model.adapter_tiles import AdapterTiles
from bridle.model.lora_layers import Sites
from bridle.threads import run_in_thread


class ModelAdapters:
    """Implements `bridle.lora.AdapterDevice`: the adapters of one model, by key, on the host and on the device.
    `kernel` multiplies the adapters (None: plain torch)."""

    #: This process never loses adapters that were read, so the epoch never changes.
    epoch = 0

    def __init__(
        self, sites: Sites, dtype: torch.dtype, device: torch.device, kernel: AdapterKernel | None = None
    ) -> None:
        self._sites = sites
        self._dtype = dtype
        self._device = device
        self._layouts = LayoutCache(sites.places)
        self._on_host: dict[str, HostAdapter] = {}
        self.on_device: dict[str, PlacedAdapter] = {}
        self._kernel: AdapterKernel = kernel or TorchKernel()
        self._side = SideStream(device)

    @property
    def layers(self) -> Mapping[str, LayerShape]:
        """Return the shapes of the layers that adapters may change."""
        return self._sites.layers

    def __contains__(self, key: str) -> bool:
        """Return whether the adapter is on the device."""
        return key in self.on_device

    def read(self, key: str, files: AdapterFiles) -> None:
        """Read an adapter from disk to the host. Raises `AdapterRefused`."""
        self._on_host[key] = run_in_thread(lambda: read_weights(files))

    def place(self, key: str) -> None:
        """Copy an adapter from the host to the device."""
        adapter = self._on_host.get(key)
        if adapter is None:
            raise InternalError(f"adapter {key!r} cannot be placed on the device, because its files were not read")
        layout = self._layouts.of(adapter.files.shapes)
        self.on_device[key] = run_in_thread(lambda: self._placed(adapter, layout))

    def _placed(self, adapter: HostAdapter, layout: AdapterLayout) -> PlacedAdapter:
        """Copy the adapter to the device, test its kernels, and return it. Steps continue meanwhile."""
        with self._side.beside():
            placed = place(adapter, layout, self._sites.places, self._dtype, self._device)
            self._kernel.prepare(placed)
        used_by_steps(placed.flat)
        return placed

    def displace(self, key: str) -> None:
        """Free the adapter's memory on the device."""
        self.on_device.pop(key, None)

    def drop(self, key: str) -> None:
        """Free the adapter's memory on the host."""
        self._on_host.pop(key, None)

    def clear(self) -> None:
        """Forget all adapters."""
        self._on_host.clear()
        self.on_device.clear()
        self._kernel.clear()

    # -- a step --------------------------------------------------------------------------------------------------

    def begin_step(self, rows: Sequence[PlanRow]) -> AdapterStep | None:
        """Return the `AdapterStep` for `rows`, whose tokens are packed in order; None if no row has an adapter."""
        segments = self.segments(rows)
        return AdapterStep(segments, sum(row.num_scheduled for row in rows), self._kernel) if segments else None

    def segments(self, rows: Sequence[PlanRow]) -> list[Segment]:
        """Return the runs of packed tokens in `rows` that have the same adapter."""
        segments: list[Segment] = []
        start = stop = 0
        current: str | None = None
        for row in rows:
            if row.adapter != current:
                self._close(segments, current, start, stop)
                current, start = row.adapter, stop
            stop += row.num_scheduled
        self._close(segments, current, start, stop)
        return segments

    def _close(self, segments: list[Segment], key: str | None, start: int, stop: int) -> None:
        if key is not None:
            segments.append(Segment(start, stop, self.on_device[key]))

    def applied(self, step: AdapterStep) -> AbstractContextManager[None]:
        """Inside the `with` block, the model's layers add the results of the adapters in `step`."""
        return self._sites.applied(step)

    # -- steps that are captured ---------------------------------------------------------------------------------

    def tiles(self, num_tiles: int) -> AdapterTiles | None:
        """Return memory for up to `num_tiles` adapter tiles of captured steps; None if plain torch multiplies
        adapters."""
        kernel = self._kernel
        if not isinstance(kernel, TriedKernel) or kernel.fused is None or not self._sites.places:
            return None
        return AdapterTiles(kernel, self._layout_of_all, self._dtype, num_tiles)

    def _layout_of_all(self, rank: int) -> AdapterLayout:
        """Return the layout of an adapter that changes every layer with this rank."""
        shapes = {
            name: LoraShape(rank, shape.in_features, shape.out_features, 1.0) for name, shape in self.layers.items()
        }
        return make_layout(shapes, self._sites.places)

    @contextmanager
    def on_trial(self) -> Iterator[str]:
        """Inside the `with` block, an adapter with random values for every layer is on the device; yield its key."""
        key, layout = "", self._layout_of_all(RANK_STEP)
        flat = torch.randn(layout.num_values, generator=torch.Generator().manual_seed(0))
        for block in layout.blocks.values():
            flat[block.begin : block.end] *= 0.5 / math.sqrt(math.sqrt(block.num_inputs * RANK_STEP))
        placed = PlacedAdapter(layout, flat.to(self._device, self._dtype))
        self._kernel.prepare(placed)
        self.on_device[key] = placed
        try:
            yield key
        finally:
            del self.on_device[key]


def check_complete(step: AdapterStep) -> None:
    """Raise `InternalError` if the model used a layer's weight without calling the layer. The step would otherwise lack
    the adapter's result for this layer."""
    if step.num_added != len(step.by_site):
        raise InternalError(f"only {step.num_added} of {len(step.by_site)} layers with adapters were called")
