"""Pairs of checkpoints in which the smaller one proposes draft tokens for the larger one, with a chosen acceptance
rate.

The draft model consists of the first layers of the larger one. The other layers of the larger one do not change the
hidden states. So both models give the same results, while the larger one computes as much as any model of its shape. A
second draft model has other weights and is never right.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bridle.bench.checkpoints import make_checkpoint
from bridle.demo import demo_model_path

#: Layers of the draft model by the size of the larger one.
LAYERS = {"20m": 1, "0.5b": 2, "1.5b": 2}


def make_pair(size: str, folder: Path) -> tuple[Path, Path, Path]:
    """Return the larger checkpoint, a draft model that is always right, and a draft model that is never right."""
    path = make_checkpoint(size, folder).path
    model = AutoModelForCausalLM.from_pretrained(path)
    num_layers = LAYERS[size]
    with torch.no_grad():
        for layer in model.model.layers[num_layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(path)
    config = AutoConfig.from_pretrained(path, num_hidden_layers=num_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    wanted = AutoModelForCausalLM.from_config(config)
    wanted.load_state_dict(model.state_dict(), strict=False)
    paths = path, folder / f"{size}-right", folder / f"{size}-wrong"
    wanted.save_pretrained(paths[1])
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(paths[2])
    for path in paths:  # with the demo's tokenizer, which shows that the vocabularies are equal
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model_path() / name, path)
    return paths
