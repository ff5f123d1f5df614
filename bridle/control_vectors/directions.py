"""Computes the directions of a control vector, one for each layer, from the hidden states of pairs of prompts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bridle.errors import InvalidRequest

Method = Literal["mean", "pca"]
METHODS: tuple[Method, ...] = ("mean", "pca")


class LastRows:
    """Records the last row of each layer's output. In a step with one sequence, the last row is the state of the
    sequence's last token."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def __call__(self, layer: int, rows: Tensor) -> None:
        self._rows[layer] = rows[-1].to("cpu", torch.float32, copy=True)  # layers may compute in place

    def states(self) -> Tensor:
        """Return the recorded hidden states, [layers, hidden]."""
        return torch.stack([self._rows[layer] for layer in sorted(self._rows)])


def make_directions(positive: Tensor, negative: Tensor, method: Method = "mean") -> dict[int, Tensor]:
    """Return the directions from `negative` to `positive` for all layers but the first. `positive` and `negative` are
    hidden states [pairs, layers, hidden], each for one prompt of every pair. With the method `mean`, a direction is the
    mean difference of the pairs. With `pca`, a direction is the first principal component of the differences, scaled to
    their mean length along this component. Raises `InvalidRequest`."""
    if method not in METHODS:
        raise InvalidRequest(f"method: got {method!r}; must be one of {', '.join(METHODS)}", "method")
    if positive.shape != negative.shape or positive.shape[0] < 1:
        raise InvalidRequest("pairs: at least one pair of prompts is needed", "pairs")
    differences = (positive - negative).transpose(0, 1)  # [layers, pairs, hidden]
    make = _first_component if method == "pca" else _mean
    return {layer: make(differences[layer]) for layer in range(1, differences.shape[0])}


def _mean(differences: Tensor) -> Tensor:
    return differences.mean(0)


def _first_component(differences: Tensor) -> Tensor:
    """Return the scaled first principal component of the differences: [pairs, hidden] -> [hidden]. The pairs'
    differences are not centred, because their common part is the direction."""
    _, _, components = torch.linalg.svd(differences, full_matrices=False)
    first: Tensor = components[0]
    return first * (differences @ first).mean()
