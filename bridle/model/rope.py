"""Rotary positions: fixes scalings that depend on the length of a batch, and makes tables of cosines and sines for
GPUs. In transformers, the scalings `dynamic` and `longrope` choose frequencies by the largest position in a call. In a
packed step, this can be the position of another sequence. So one long sequence would change the results of all others,
and cached keys would have other frequencies. In bridle, the frequencies are chosen once, while loading, for
`max_model_len`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Number of positions whose angles are computed at once, and the maximum bytes of a model's tables.
POSITIONS, MAX_TABLE_BYTES = 4096, 256 << 20


def fix_rotary_scaling(model: nn.Module, max_model_len: int) -> list[str]:
    """Fix the frequencies of all rotary modules for `max_model_len`; return a text about each change."""
    notes = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _is_dynamic(kinds):
            notes.append(_fix(module, kinds, None, max_model_len))
            setattr(module, "rope_type", "default")  # noqa: B010  (an nn.Module types its attributes as tensors)
        elif isinstance(kinds, dict):
            for layer_type, kind in list(kinds.items()):
                if isinstance(kind, str) and _is_dynamic(kind):
                    notes.append(_fix(module, kind, layer_type, max_model_len))
                    kinds[layer_type] = "default"
    return notes


def _is_dynamic(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _fix(module: Any, kind: str, layer_type: str | None, max_model_len: int) -> str:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = f"{layer_type}_" if layer_type is not None else ""
    parameters = module.config.rope_parameters
    parameters = parameters[layer_type] if layer_type is not None else parameters
    trained = parameters.get("original_max_position_embeddings") or module.config.max_position_embeddings
    if max_model_len <= trained:
        return f"{kind} rotary scaling: original frequencies, up to {trained} positions"
    buffer = getattr(module, f"{prefix}inv_freq")
    keywords = {"layer_type": layer_type} if layer_type is not None else {}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, buffer.device, seq_len=max_model_len, **keywords)
    with torch.no_grad():
        buffer.copy_(frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return f"{kind} rotary scaling: frequencies for {max_model_len} positions, also for short sequences"


# -- tables ------------------------------------------------------------------------------------------------

#: Computes the angles of positions [1, N]: cosines and sines [N, 1, D] for each of a model's tables. The first half of
#: the sines is negated.
Compute = Callable[[Tensor], Sequence[tuple[Tensor, Tensor]]]


@dataclass(frozen=True, slots=True)
class Angles:
    """The cosines and sines [P, 2, D/2] of P positions, for each rotation table of a model. `places` [T] has each
    token's index in the tables."""

    tables: tuple[Tensor, ...]
    places: Tensor


def angles_of(turns: Sequence[tuple[Tensor, Tensor]]) -> Angles:
    """Return `Angles` from cosines and sines that were computed for the tokens of one step."""
    made = _halves(turns)
    return Angles(made.unbind(1), torch.arange(made.shape[0], device=made.device))


def make_tables(compute: Compute, num_positions: int, device: torch.device) -> tuple[Tensor, ...] | None:
    """Return the rotation tables of `num_positions` positions, whose angles `compute` computes. Return None if the
    tables take too much memory, or if the two halves of a head have different angles."""
    made: Tensor | None = None
    for first in range(0, num_positions, POSITIONS):
        last = min(first + POSITIONS, num_positions)
        turns = compute(torch.arange(first, last, device=device).unsqueeze(0))
        part = _halves(turns)
        if made is None:
            made = part.new_empty(num_positions, *part.shape[1:])
        if made.nbytes > MAX_TABLE_BYTES or not are_halved(turns):
            return None
        made[first:last] = part
    return None if made is None else made.unbind(1)


def fits_memory(compute: Compute, num_positions: int) -> bool:
    """Return whether the rotation tables of `num_positions` positions, whose angles `compute` computes, fit the memory
    limit."""
    one = sum(cos.nbytes + sin.nbytes for cos, sin in compute(torch.zeros(1, 1, dtype=torch.int64)))
    return one * num_positions <= MAX_TABLE_BYTES


def are_halved(turns: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether both halves of each head have the same rotation angles."""
    halved = ((*cos.chunk(2, -1), *sin.chunk(2, -1)) for cos, sin in turns)
    return all(torch.equal(a, b) and torch.equal(c, -d) for a, b, c, d in halved)


def _halves(turns: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the second halves of all cosines and sines as one tensor [N, tables, 2, D/2]."""
    parts = [torch.cat([each[..., each.shape[-1] // 2 :] for each in turn], 1) for turn in turns]
    return torch.stack(parts, 1)
