"""Adapters written file by file, as PEFT would, or as nobody should."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bridle.lora import LayerShape

LAYERS = {
    f"model.layers.{number}.{name}": LayerShape(*sides)
    for number in range(3)
    for name, sides in {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (32, 16),
        "self_attn.v_proj": (32, 16),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (32, 64),
        "mlp.up_proj": (32, 64),
        "mlp.down_proj": (64, 32),
    }.items()
}
#: Every kind of layer that a dense model of the Llama make has.
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    layers: Mapping[str, LayerShape] = LAYERS,
    *,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, Tensor | None] | None = None,
    ranks: Mapping[str, int] | None = None,
    **fields: Any,
) -> Path:
    """An adapter for the layers whose names end in one of `targets`, large enough to change what is said. `tensors`
    adds to its tensors or replaces them (None: leaves one out), `ranks` sets those of single layers, `fields` are those
    of its configuration."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in layers.items():
        if not name.endswith(targets):
            continue
        own = (ranks or {}).get(name, rank)
        first = torch.randn(own, shape.in_features, generator=generator) / math.sqrt(shape.in_features)
        second = torch.randn(shape.out_features, own, generator=generator) * 0.5
        weights[f"base_model.model.{name}.lora_A.weight"] = first.to(dtype)
        weights[f"base_model.model.{name}.lora_B.weight"] = second.to(dtype)
    weights.update({name: tensor for name, tensor in (tensors or {}).items() if tensor is not None})
    for name in [name for name, tensor in (tensors or {}).items() if tensor is None]:
        del weights[name]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
