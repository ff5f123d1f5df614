"""Control vectors of random directions, and steps of one executor that apply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bridle.engine.control.vector_scales import VectorSpan
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, StepPlan

BLOCK = 4


def directions(num_layers: int, hidden: int, seed: int = 0, size: float = 1.0) -> dict[int, Tensor]:
    """Return a random direction for each layer but the first."""
    generator = torch.Generator().manual_seed(seed)
    return {layer: size * torch.randn(hidden, generator=generator) for layer in range(1, num_layers)}


def put(executor: Any, **scales: float) -> dict[str, str]:
    """Load a random vector for each name, scaled by the given number, and return the keys of the vectors."""
    store = executor.control_vectors
    for seed, (name, size) in enumerate(scales.items()):
        store.put(name, directions(store.num_layers, store.hidden_size, seed, size))
    keys: dict[str, str] = store.open(scales)
    return keys


def plan_of(rows: Sequence[tuple[Sequence[int], Sequence[VectorSpan]]]) -> StepPlan:
    """Return the plan of an executor's first step: rows with their control vectors, and logits of all positions."""
    planned, block = [], 0
    for number, (tokens, spans) in enumerate(rows):
        size, blocks = len(tokens), tuple(range(block, block - (-len(tokens) // BLOCK)))
        block += len(blocks)
        row = PlanRow(number, 0, size, size, new_tokens=tuple(tokens), new_blocks=blocks, vectors=tuple(spans))
        planned.append(row)
    return StepPlan(1, planned)


def step_logits(executor: Any, rows: Sequence[tuple[Sequence[int], Sequence[VectorSpan]]]) -> list[Tensor]:
    """Return the logits [len(tokens), V] of each row, with the rows' control vectors and in one step."""
    executor.reset()
    executor.forward(plan_of(rows))
    executor.sample(SampleBatch(1))
    return list(executor.logits.clone().split([len(tokens) for tokens, _ in rows]))


def span(length: int, keys: Mapping[str, str], offset: int = 0, **scales: float) -> VectorSpan:
    """Return the control vectors of `length` tokens from `offset` on."""
    return VectorSpan(offset, length, tuple(sorted((keys[name], scale) for name, scale in scales.items())))
