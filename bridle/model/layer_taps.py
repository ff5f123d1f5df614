"""Taps read or change the hidden states after each layer: they add control vectors and record states. A tap is called
with the number of a layer and its output. Steps without a tap compute the layers as usual. For layers of transformers,
forward hooks call the tap during steps with a tap.
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
#: Tokens `first` to before `last` of a step, and the vector [hidden] to add to their hidden states after each layer.
Addition = tuple[int, int, Mapping[int, Tensor]]


def vector_tap(
    rows: Sequence[PlanRow], vectors: ControlVectors | None, reader: ProbeReader | None = None
) -> LayerTap | None:
    """Return the tap that adds the control vectors of `rows`, whose tokens are packed in order. After adding vectors,
    the tap passes the hidden states to `vectors.recorder` and to `reader`. Returns None if there are no control vectors
    to add, no recorder and no reader."""
    if vectors is None or not (vectors.recorder or reader or any(row.vectors for row in rows)):
        return None
    additions: list[Addition] = []
    start = 0
    for row in rows:
        for span in row.vectors:
            first = start + span.offset
            additions.append((first, first + span.length, vectors.mixed(span.mix)))
        start += row.num_scheduled
    observers = [each for each in (vectors.recorder, reader) if each is not None]
    return partial(_add, additions, observers)


def _add(additions: Sequence[Addition], observers: Sequence[LayerTap], layer: int, rows: Tensor) -> None:
    for first, end, mixed in additions:
        if layer in mixed:
            rows[first:end] += mixed[layer]
    for observe in observers:
        observe(layer, rows)


class ProbeReader:
    """Projects hidden states onto directions of control vectors (probes), at the positions of a step that give
    logits."""

    def __init__(self, rows: Sequence[PlanRow], vectors: ControlVectors) -> None:
        self._wanted: dict[int, list[tuple[int, int, int, Tensor]]] = {}  # position, logits row, probe, unit by layer
        self._found: list[tuple[int, int, Tensor]] = []  # logits row, probe, value
        end = num_logits = 0
        for row in rows:
            end, num_logits = end + row.num_scheduled, num_logits + row.num_logits
            for number, probe in enumerate(row.probes):
                layer, unit = vectors.unit(*probe)
                places = [(end - back, num_logits - back, number, unit) for back in range(row.num_logits, 0, -1)]
                self._wanted.setdefault(layer, []).extend(places)

    def __call__(self, layer: int, rows: Tensor) -> None:
        for position, logits_row, number, unit in self._wanted.get(layer, ()):
            self._found.append((logits_row, number, rows[position].float() @ unit))

    def readings(self) -> dict[int, tuple[float, ...]]:
        """Return the values of each row's probes, by the index of the row's logits. Waits for the device."""
        found: dict[int, dict[int, float]] = {}
        for logits_row, number, value in self._found:
            found.setdefault(logits_row, {})[number] = float(value)
        return {row: tuple(values[number] for number in sorted(values)) for row, values in found.items()}


def probe_reader(rows: Sequence[PlanRow], vectors: ControlVectors | None) -> ProbeReader | None:
    """Return a `ProbeReader` for `rows`; None if no row has probes."""
    return ProbeReader(rows, vectors) if vectors is not None and any(row.probes for row in rows) else None


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the layers of a model of transformers, in order. Raises `UnsupportedFeature` if the model has no such
    list."""
    num_layers = getattr(getattr(model, "config", None), "num_hidden_layers", 0)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers > 0:
            return module
    raise UnsupportedFeature(f"{type(model).__name__} has no list of {num_layers} layers", "control_vectors")


@contextmanager
def hooked(model: nn.Module, tap: LayerTap) -> Iterator[None]:
    """Call `tap` after each layer of a model of transformers inside the block."""
    hooks = [layer.register_forward_hook(partial(_call, tap, at)) for at, layer in enumerate(decoder_layers(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _call(tap: LayerTap, number: int, layer: nn.Module, inputs: Any, output: Any) -> None:
    """Forward hook that passes a layer's output to the tap. The output is [1, T, hidden], alone or first in a tuple."""
    rows: Tensor = output[0] if isinstance(output, tuple) else output
    tap(number, rows[0])
