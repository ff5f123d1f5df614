"""Rotary scalings that depend on the length of the batch, made to depend on `max_model_len` alone.

The library's `dynamic` and `longrope` choose frequencies from the largest position that it sees in a call. In a
packed step that is a neighbor's position, so one long sequence would change the results of all others, and the
keys already cached would not match. The choice is made once here, while loading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def fix_rotary_scaling(model: nn.Module, max_model_len: int) -> list[str]:
    """Freeze the frequencies of all rotary modules; returns in words what was fixed."""
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
