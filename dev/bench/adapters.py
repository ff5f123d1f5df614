"""Generated adapters for benchmarks: any number of adapters in PEFT's format, with random values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from bridle.lora import LayerShape

#: Suffixes of the layers that an adapter changes, by the name of the choice.
TARGETS = {
    "q and v": ("q_proj", "v_proj"),
    "all linear": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
RANK = 16


def make_adapters(folder: Path, layers: Mapping[str, LayerShape], targets: str, count: int) -> list[Path]:
    """Write `count` adapters of rank 16 in bfloat16 for a model with these layers."""
    chosen = {name: layer for name, layer in layers.items() if name.endswith(TARGETS[targets])}
    return [_make(folder / f"{targets}-{number}".replace(" ", "-"), chosen, number) for number in range(count)]


def _make(folder: Path, layers: Mapping[str, LayerShape], seed: int) -> Path:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in layers.items():
        first = torch.randn(RANK, layer.in_features, generator=generator) / math.sqrt(layer.in_features)
        second = torch.randn(layer.out_features, RANK, generator=generator) * 0.02
        tensors[f"base_model.model.{name}.lora_A.weight"] = first.bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = second.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in layers})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
