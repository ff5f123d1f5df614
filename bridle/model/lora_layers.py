"""The layers of a loaded model that LoRA adapters can change: its linear layers, under their names in transformers. If
a lean layer computes several linear layers of transformers as one product, each of these is a range of the product's
columns. While a step with adapters runs, each changed linear layer has another `forward` function. In other steps the
layers are exactly as they were loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from bridle.cpu_kernels.linear import FloatLinear, QuantizedLinear
from bridle.lora import LayerShape
from bridle.lora.layout import AdapterPlacement, IndexRange
from bridle.lora.ops import AdapterStep
from bridle.model.dense_layer import DenseLayer, Joined
from bridle.model.float8 import Float8Linear
from bridle.model.linear import PackedLinear
from bridle.model.quantization.code_linear import CodeLinear
from bridle.model.quantize import Int8Linear
from bridle.model.tensor_parallel import RowParallel, Share, share_of

LINEARS = (
    *(nn.Linear, PackedLinear, FloatLinear, Int8Linear, QuantizedLinear, CodeLinear, Float8Linear),
    *(Joined, RowParallel),
)
#: Parts of layers that compute only some tokens at a time: by expert, or by sequence.
_PARTIAL = (".experts.", ".indexer.", ".compressor.")


class Site:
    """A linear layer of the model, to whose outputs adapters can add results."""

    def __init__(self, number: int, module: nn.Module) -> None:
        self.number = number
        self.module = module
        self.step: AdapterStep | None = None
        self._compute: Callable[[Tensor], Tensor] = module.forward
        # A row-parallel layer sums its outputs over processes; adapters must be added before the sum.
        self._is_summed = isinstance(module, RowParallel)

    def run(self, rows: Tensor) -> Tensor:
        """Return the layer's outputs for `rows`, plus the results of the adapters."""
        out = self._compute(rows)
        self.add(out, rows)
        return out

    def add(self, out: Tensor, rows: Tensor) -> None:
        """Add the adapters' results for `rows` to `out`, in place."""
        assert self.step is not None
        self.step.add(self.number, out, rows)

    def put_in(self, step: AdapterStep) -> None:
        """Replace the layer's `forward` by one that adds the adapters of `step`."""
        self.step = step
        if self._is_summed:
            vars(self.module)["add"] = self.add
        else:
            vars(self.module)["forward"] = self.run
            vars(self.module)["adapt"] = self.add  # for code that computes the layer's product without `forward`

    def take_out(self) -> None:
        """Restore the layer's own `forward`."""
        self.step = None
        for name in ("add",) if self._is_summed else ("forward", "adapt"):
            vars(self.module).pop(name, None)


class Sites:
    """All sites of a model. `layers` are the linear layers that adapters may change, by name. `places` maps each layer
    to the site that computes it."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, LayerShape] = {}
        self.places: dict[str, AdapterPlacement] = {}
        self._sites: list[Site] = []
        self._lean: dict[int, DenseLayer] = {}  # by site
        for name, layer in _body(model):
            if isinstance(layer, DenseLayer):
                self._add_lean(name, layer)
            else:
                self._add_linear(name, layer)

    @contextmanager
    def applied(self, step: AdapterStep) -> Iterator[None]:
        """Inside the block, let the changed sites of `step` add its adapters' results."""
        sites = [self._sites[number] for number in step.by_site]
        lean = {id(layer): layer for number in step.by_site if (layer := self._lean.get(number)) is not None}
        try:
            for site in sites:
                site.put_in(step)
            _bind(lean.values())
            yield
        finally:
            for site in sites:
                site.take_out()
            _bind(lean.values())

    # -- finding -------------------------------------------------------------------------------------------------

    def _add_site(self, module: nn.Module) -> int:
        self._sites.append(Site(len(self._sites), module))
        return len(self._sites) - 1

    def _add_linear(self, name: str, module: Any) -> None:
        if is_transposed(module):
            num_inputs, num_outputs = module.weight.shape
        elif isinstance(module, RowParallel):
            num_outputs, num_inputs = module.weight.shape
        else:
            num_inputs, num_outputs = module.in_features, module.out_features
        columns = IndexRange(0, num_outputs)
        self._add_layer(name, share_of(module), num_inputs, self._add_site(module), columns, is_transposed(module))

    def _add_layer(
        self, name: str, share: Share, num_inputs: int, site: int, columns: IndexRange, is_transposed: bool = False
    ) -> None:
        """Register a layer of transformers. The site `site` computes this process's part `share` of the layer, in the
        range `columns` of the site's outputs."""
        full_inputs = num_inputs * (share.count if share.dim == 1 else 1)
        full_outputs = columns.size * (share.count if share.dim == 0 else 1)
        self.layers[name] = LayerShape(full_inputs, full_outputs, is_transposed)
        self.places[name] = AdapterPlacement(site, columns, *_spans(share, num_inputs, columns.size))

    def _add_lean(self, name: str, layer: DenseLayer) -> None:
        """Register the layers of transformers that a lean layer computes, each with its columns in a product."""
        heads, kv_heads = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        groups: tuple[tuple[Any, str, dict[str, int]], ...] = (
            (layer.qkv, "self_attn", _sizes(layer.attention_parts, heads, kv_heads, kv_heads)),
            (layer.out, "self_attn", {"o_proj": layer.out.out_features}),
            (layer.gate_up, "mlp", _sizes(layer.mlp_parts, layer.num_gates, layer.num_gates)),
            (layer.down, "mlp", {"down_proj": layer.down.out_features}),
        )
        for module, within, parts in groups:
            site, begin = self._add_site(module), 0
            self._lean[site] = layer
            for part, size in parts.items():
                columns = IndexRange(begin, begin + size)
                self._add_layer(f"{name}.{within}.{part}", share_of(module), module.in_features, site, columns)
                begin += size


def _body(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the lean layers and the other linear layers with their names. The output head is left out, and so are
    layers that get only some of a step's tokens at a time."""
    head = model.get_output_embeddings()
    within = ""
    for name, module in model.named_modules():
        if within and name.startswith(within):
            continue
        if isinstance(module, DenseLayer):
            within = f"{name}."
            yield name, module
        elif module is head or any(part in name for part in _PARTIAL):
            continue
        elif type(module) in LINEARS or is_transposed(module):
            yield name, module


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is `Conv1D` of transformers, a linear layer with a weight [in, out]."""
    library = sys.modules.get("transformers.pytorch_utils")  # imported if such a layer exists
    return library is not None and type(module) is library.Conv1D


def _spans(share: Share, num_inputs: int, num_outputs: int) -> tuple[IndexRange, IndexRange]:
    """Return the ranges of a layer's inputs and outputs, of these sizes, that this process computes."""
    inputs = share.rank * num_inputs if share.dim == 1 else 0
    outputs = share.rank * num_outputs if share.dim == 0 else 0
    return IndexRange(inputs, inputs + num_inputs), IndexRange(outputs, outputs + num_outputs)


def _sizes(names: tuple[str, ...], *sizes: int) -> dict[str, int]:
    """Return the number of outputs of each transformers layer in `names`. If `names` has one joined layer, its number
    of outputs is the sum of `sizes`."""
    return dict(zip(names, sizes, strict=True)) if len(names) > 1 else {names[0]: sum(sizes)}


def _bind(layers: Iterable[DenseLayer]) -> None:
    """Let lean layers use their current linear layers (see `DenseLayer.bind`)."""
    for layer in layers:
        layer.bind()
