"""Saves a checkpoint in 8 bits, with the same weights that `--quantization int8` computes when a model is loaded. The
format is compressed-tensors: integers with a scale for each output. Other programs can read compressed-tensors
checkpoints as well."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from bridle.model.checkpoint import Checkpoint
from bridle.model.quantize import is_large, round_to_int8

_COPIED = ("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja")
_PART = {"num_bits": 8, "type": "int", "symmetric": True}


def save_int8(checkpoint: Checkpoint, model: nn.Module, out: Path, progress: Callable[[float], None]) -> Path:
    """Write the model of `checkpoint` into the new folder `out`, which gets this name when it is complete."""
    tensors, rounded = _tensors(model, progress)
    config = {**checkpoint.config, "tie_word_embeddings": False, "quantization_config": _describe(model, rounded)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".new-") as made:
        draft = Path(made) / "checkpoint"
        draft.mkdir()
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        for pattern in (*_COPIED, "generation_config.json"):
            for path in checkpoint.folder.glob(pattern):
                if path.is_file() and path.suffix != ".safetensors":
                    shutil.copyfile(path, draft / path.name)
        draft.rename(out)
    return out


def _tensors(model: nn.Module, progress: Callable[[float], None]) -> tuple[dict[str, Tensor], set[str]]:
    """Return all tensors by name, and the names of the layers that were rounded to 8 bits."""
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and is_large(m)}
    tensors: dict[str, Tensor] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for at, (name, parameter) in enumerate(parameters):
        layer = name.removesuffix(".weight")
        if layer in linears:
            integers, scale = round_to_int8(parameter.detach())
            tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"] = integers, scale[:, None]
        else:
            tensors[name] = parameter.detach().contiguous()
        progress((at + 1) / len(parameters))
    return tensors, set(linears)


def _describe(model: nn.Module, rounded: set[str]) -> dict[str, Any]:
    left = sorted(name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in rounded)
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_PART, "strategy": "channel", "dynamic": False},
                "input_activations": {**_PART, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": left,
    }
