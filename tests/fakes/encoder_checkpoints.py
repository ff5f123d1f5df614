"""Make tiny random checkpoints of pooling models: encoders, classifiers and sentence-transformers folders. The
tokenizer has one token per byte, and puts `<s>` and `</s>` around texts and pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.fakes import tiny_checkpoints
from tests.fakes.made_once import made_once

_SIZES: dict[str, Any] = {
    "vocab_size": tiny_checkpoints.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": tiny_checkpoints.PAD,
    "bos_token_id": tiny_checkpoints.BOS,
    "eos_token_id": tiny_checkpoints.EOS,
}
#: What each family's configuration needs beside the common fields.
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 4},
    "electra": {"embedding_size": 16, "type_vocab_size": 2},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 3, "cls_token_id": 1, "sep_token_id": 2},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "mpnet": {"relative_attention_num_buckets": 32},
    "deberta": {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {  # as version 3 has them
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 12,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "ernie": {"type_vocab_size": 4, "task_type_vocab_size": 3},
    "camembert": {"type_vocab_size": 1},
    "gte": {},
    "nomic_bert": {},
    "eurobert": {},
}
DECODERS = ("llama", "qwen2", "qwen3", "gemma2", "mistral")


@made_once
def make_encoder(
    family: str,
    folder: Path,
    *,
    labels: Sequence[str] | None = None,
    head: str | None = None,
    seed: int = 0,
    **overrides: Any,
) -> None:
    """Write a checkpoint of `family` into `folder`: a plain encoder, or a classifier if `labels` are given. `head` may
    name another automatic class of transformers, such as `AutoModelForMaskedLM`."""
    import transformers

    own = ENCODERS[family] if family in ENCODERS else tiny_checkpoints.FAMILIES.get(family, {})
    fields = {**_SIZES, **own, **overrides}
    if labels is not None:
        fields |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    config = transformers.AutoConfig.for_model(family, **{name: v for name, v in fields.items() if v is not None})
    kind = head or ("AutoModel" if labels is None else "AutoModelForSequenceClassification")
    model = getattr(transformers, kind).from_config(config)
    _randomize(model, seed)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    save_tokenizer(folder)


def _randomize(model: nn.Module, seed: int) -> None:
    """Set random weights with which each token matters and different texts get different embeddings."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name and parameter.dim() > 1:
                parameter.copy_(noise * 0.7)
            elif parameter.dim() > 1:
                parameter.copy_(noise * 1.3 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(noise * 0.1)


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer of `tiny_checkpoints`, which adds `<s>` and `</s>` around a text and between two texts."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tiny_checkpoints.save_tokenizer(folder)
    path = folder / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", tiny_checkpoints.BOS), ("</s>", tiny_checkpoints.EOS)],
    )
    backend.save(str(path))


def make_sentence_model(
    family: str,
    folder: Path,
    modules: Sequence[tuple[str, Mapping[str, Any]]] = (("Pooling", {"pooling_mode_mean_tokens": True}),),
    *,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    **fields: Any,
) -> Path:
    """Write a sentence-transformers folder: an encoder and further modules, each given as class name and configuration.
    Dense layers and norms get random weights."""
    make_encoder(family, folder, **fields)
    rows = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, 1):
        name = f"{number}_{kind}"
        full = kind if "." in kind else f"sentence_transformers.models.{kind}"
        rows.append({"idx": number, "name": str(number), "path": name, "type": full})
        _write_module(folder / name, kind, config, number)
    _write(folder / "modules.json", rows)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": dict(prompts or {}), "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"},
    )
    return folder


def _write_module(folder: Path, kind: str, config: Mapping[str, Any], seed: int) -> None:
    folder.mkdir(exist_ok=True)
    _write(folder / "config.json", config)
    generator = torch.Generator().manual_seed(seed)
    if kind == "Dense":
        shape = config["out_features"], config["in_features"]
        tensors = {"linear.weight": torch.randn(shape, generator=generator) / math.sqrt(shape[1])}
        if config.get("bias", True):
            tensors["linear.bias"] = torch.randn(shape[0], generator=generator) * 0.1
        save_file(tensors, folder / "model.safetensors")
    elif kind == "LayerNorm":
        size = config["dimension"]
        weight = 1 + 0.1 * torch.randn(size, generator=generator)
        save_file({"norm.weight": weight, "norm.bias": torch.zeros(size)}, folder / "model.safetensors")


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
