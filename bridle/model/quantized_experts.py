"""Mixture-of-experts layers whose matrices stay quantized. In transformers, the matrices of all experts are in one
tensor, and not quantized. An expert is two or three quantized linear layers. The results of a token's experts are added
in the order of expert numbers. A token's result therefore does not depend on the other tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

#: One expert: the products whose concatenated outputs are its gate and values, and the down projection.
Expert = tuple[Sequence[nn.Module], nn.Module]
#: Computes the input of the down projection from the outputs of the first products, [n, inner] or [n, 2 inner].
Gate = Callable[[Tensor], Tensor]


class PackedExperts(nn.Module):
    """Experts with quantized weights that replace the module `original`."""

    def __init__(self, original: Any, experts: Sequence[Expert]) -> None:
        super().__init__()
        self.gate = _gate_of(original)
        self.num_experts = len(experts)
        self.inner = nn.ModuleList(nn.ModuleList(inner) for inner, _ in experts)
        self.down = nn.ModuleList(down for _, down in experts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts: [T, hidden] -> [T, hidden]. `top_k_index` [T, k] are the
        token's experts, and `top_k_weights` [T, k] their weights."""
        out = torch.zeros_like(hidden_states)
        numbers, order = top_k_index.flatten().sort(stable=True)  # [T * k]: the tokens of each expert, in order
        tokens = order.div(top_k_index.shape[1], rounding_mode="floor")
        rows, shares = hidden_states[tokens], top_k_weights.flatten()[order, None]
        for number, begin, end in _runs(numbers.tolist()):
            if number < self.num_experts:  # a larger number means no expert
                found = self._compute(number, rows[begin:end]) * shares[begin:end]
                out.index_add_(0, tokens[begin:end], found.to(out.dtype))
        return out

    def _compute(self, number: int, rows: Tensor) -> Tensor:
        """Compute one expert: [n, hidden] -> [n, hidden]"""
        parts: Any = self.inner[number]
        inner = [layer(rows) for layer in parts]
        found: Tensor = self.down[number](self.gate(inner[0] if len(inner) == 1 else torch.cat(inner, -1)))
        return found


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each distinct number in a sorted sequence, with the begin and end of its run."""
    begin = 0
    for number, same in groupby(numbers):
        end = begin + sum(1 for _ in same)
        yield number, begin, end
        begin = end


def _gate_of(original: Any) -> Gate:
    if not original.has_gate:
        activation: Gate = original.act_fn
        return activation
    if not original.is_concatenated:
        return _clamped(original)
    if original._apply_gate.__name__ == "_default_apply_gate":
        return _plain(original)
    gate: Gate = original._apply_gate
    return gate


def _plain(original: Any) -> Gate:
    activation = original.act_fn

    def apply(inner: Tensor) -> Tensor:
        gate, values = inner.chunk(2, -1)
        return activation(gate) * values  # type: ignore[no-any-return]

    return apply


def _clamped(original: Any) -> Gate:
    """Return the activation function of gpt-oss: gates and values are clamped, and 1 is added to the values."""
    alpha, limit = original.alpha, original.limit

    def apply(inner: Tensor) -> Tensor:
        gate, values = inner.chunk(2, -1)
        gate, values = gate.clamp(max=limit), values.clamp(-limit, limit)
        return (values + 1) * (gate * torch.sigmoid(gate * alpha))

    return apply
