"""What looks at the hidden states behind each layer, or changes them: control vectors, and recorders.

A tap is called with the number of a layer and its output. Steps without one compute the layers as ever. A model whose
layers are the library's has hooks on them while a step with a tap runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from bridle.control_vectors import ControlVectors
from bridle.engine.scheduling.step_plan import PlanRow
from bridle.errors import UnsupportedFeature

#: Called with the number of a layer, from 0, and its output [T, hidden], which it may change in place.
LayerTap = Callable[[int, Tensor], None]
#: Tokens of a step, from one to before another, with what is added to each behind each layer, [hidden].
Addition = tuple[int, int, Mapping[int, Tensor]]


def vector_tap(rows: Sequence[PlanRow], vectors: ControlVectors | None) -> LayerTap | None:
    """Return the tap that adds the control vectors of `rows`, whose tokens are packed in order, and then records; None
    if there is nothing to do."""
    if vectors is None or not (vectors.recorder or any(row.vectors for row in rows)):
        return None
    additions: list[Addition] = []
    start = 0
    for row in rows:
        for span in row.vectors:
            first = start + span.offset
            additions.append((first, first + span.length, vectors.mixed(span.mix)))
        start += row.num_scheduled
    return partial(_add, additions, vectors.recorder)


def _add(additions: Sequence[Addition], recorder: LayerTap | None, layer: int, rows: Tensor) -> None:
    for first, end, mixed in additions:
        if layer in mixed:
            rows[first:end] += mixed[layer]
    if recorder is not None:
        recorder(layer, rows)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the layers of a model of the library, in order. Raises `UnsupportedFeature` if it has no such list."""
    num_layers = getattr(getattr(model, "config", None), "num_hidden_layers", 0)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers > 0:
            return module
    raise UnsupportedFeature(f"{type(model).__name__} has no list of {num_layers} layers", "control_vectors")


@contextmanager
def hooked(model: nn.Module, tap: LayerTap) -> Iterator[None]:
    """Call `tap` behind each layer of a model of the library inside the block."""
    hooks = [layer.register_forward_hook(partial(_call, tap, at)) for at, layer in enumerate(decoder_layers(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _call(tap: LayerTap, number: int, layer: nn.Module, inputs: Any, output: Any) -> None:
    """The hook of a layer whose output is [1, T, hidden], alone or first in a tuple."""
    rows: Tensor = output[0] if isinstance(output, tuple) else output
    tap(number, rows[0])
