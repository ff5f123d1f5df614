"""Small models that tests write as GGUF files, and functions that compute their logits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from bridle.gguf.families import FAMILIES
from bridle.model import loader, support_checks
from bridle.model.checkpoint import inspect_checkpoint
from bridle.model.forward_context import AttentionOptions, attention_handler
from bridle.model.hub_lookup import resolve_model
from bridle.serving.models.export import quantize_model
from tests.fakes import tiny_checkpoints
from tests.leftovers import kept_folder

PROMPT = [1, 40, 77, 90, 44, 31, 22, 198, 77, 41, 9, 23, 120, 200, 222, 131, 90, 120, 6, 33, 200, 150, 9, 60]

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}
#: What a family needs so that a GGUF file can say it.
NEEDED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True, "layer_types": ["sliding_attention"] * 3},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "layer_types": ["sliding_attention"] * 3},
    "olmo": {"clip_qkv": 0.7},
    "olmoe": {"num_key_value_heads": 4},
    "olmo3": {"layer_types": ["sliding_attention"] * 3},
    "qwen3_moe": {"norm_topk_prob": True},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v2": {**_LATENT, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "global_head_dim": 16,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
        "max_position_embeddings": 32,
    },
    "minicpm": {"attention_multiplier": 8**-0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.8},
    "exaone4": {"sliding_window": 512, "layer_types": ["sliding_attention"] * 3},  # llama.cpp takes 4,096 for any
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "gpt_oss": {
        "layer_types": None,  # every other layer slides
        "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
    },
}
ALL_FAMILIES = (
    "llama", "mistral", "mixtral", "smollm3", "granite", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "phi3", "olmo2", "seed_oss", "starcoder2", "stablelm", "cohere", "cohere2", "olmo", "olmo3", "olmoe",
    "nemotron", "glm4", "phi", "arcee", "ernie4_5", "gpt_oss", "glm4_moe", "gemma4_text",
    "dots1", "minimax_m2", "ministral3",
    "exaone4", "hunyuan_v1_dense", "hunyuan_v1_moe", "deepseek_v2", "deepseek_v3",
)  # fmt: skip

#: Architectures whose files are read as another family's model.
ALIASES = {family.arch: family for family in FAMILIES if family.is_alias}

#: Rows that the blocks of every type divide, of models with experts.
EXPERT_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 2,
}

_made: dict[str, tuple[Path, Path]] = {}


@cache
def folder() -> Path:
    """Return a folder that lives as long as the process."""
    return kept_folder("bridle-gguf-")


def pair(family: str, kind: str = "F32", **overrides: Any) -> tuple[Path, Path]:
    """Return the paths of a checkpoint and of the same model as a GGUF file of type `kind`. Architectures that bridle
    reads but does not write are written under an alias."""
    if family in ALIASES:
        alias = ALIASES[family]
        with patch.dict("bridle.gguf.families.BY_MODEL_TYPE", {alias.model_type: alias}):
            fields = {"tie_word_embeddings": False, "aliased": family, **NEEDED.get(family, {})}
            return pair(alias.model_type, kind, **{**fields, **overrides})
    key = repr((family, kind, sorted(overrides.items())))
    if key not in _made:
        fields = {name: value for name, value in overrides.items() if name != "aliased"}
        original = tiny_checkpoints.cached_checkpoint(family, **{**NEEDED.get(family, {}), **fields})
        file = folder() / f"{family}-{len(_made)}-{kind}.gguf"
        neutral = folder() / f"model-{len(_made)}"  # llama.cpp takes some names in a file for those of real models
        neutral.symlink_to(original)
        _made[key] = original, quantize_model(str(neutral), file, kind)
    return _made[key]


def load(name: Path) -> nn.Module:
    """Load a model in float32 as the loader reads it."""
    checkpoint = inspect_checkpoint(resolve_model(str(name)))
    return loader.read_model(checkpoint, support_checks.read_config(checkpoint), torch.float32, torch.device("cpu"))


@torch.inference_mode()
def logits(model: Any, tokens: list[int] = PROMPT) -> Tensor:
    """Return the logits [T, V] of the tokens, computed with plain attention in one pass."""
    ids = torch.tensor([tokens])
    with attention_handler(_attend):
        output = model(input_ids=ids, position_ids=torch.arange(len(tokens))[None], use_cache=False)
    return output.logits[0]  # type: ignore[no-any-return]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, extra: dict[str, Any]
) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * options.scaling
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    places = torch.arange(len(query))
    distance = places[:, None] - places[None, :]
    hidden = (distance < 0) | (distance >= (options.window or len(query)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:  # a key without a value
        sinks = options.sinks[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(query)], value).contiguous()


def split_file(file: Path, stem: Path) -> None:
    """Split a GGUF file into two, called `stem-00001-of-00002.gguf` and `stem-00002-of-00002.gguf`."""
    from gguf import GGMLQuantizationType, GGUFWriter

    from bridle.gguf import open_gguf

    whole = open_gguf(file)
    names = list(whole.tensors)
    for number, part in enumerate((names[:10], names[10:])):
        writer = GGUFWriter(stem.with_name(f"{stem.name}-{number + 1:05d}-of-00002.gguf"), "llama")
        if number == 0:
            _copy_metadata(whole.metadata, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        for name in part:
            entry = whole.tensors[name]
            data = whole.read(name).view("f4").reshape(entry.shape)
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def mxfp4_file(file: Path) -> Path:
    """Copy a GGUF file with its experts converted to MXFP4, the type in which gpt-oss is published."""
    return rewritten(file, "mxfp4", "_exps.weight")


def rewritten(
    file: Path,
    name: str,
    mxfp4: str = "-",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Copy a GGUF file in F32 under `name`, with `metadata` and `tensors` added. Tensors whose names end in `mxfp4` are
    converted to MXFP4. Metadata and tensors whose names end in one of `without` are left out."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    from bridle.gguf import open_gguf

    whole, path = open_gguf(file), file.with_suffix(f".{name}.gguf")
    writer = GGUFWriter(path, str(whole.metadata["general.architecture"]))
    kept = {key: value for key, value in whole.metadata.items() if not key.endswith(without)}
    _copy_metadata({**kept, **(metadata or {})}, writer)
    for each, entry in whole.tensors.items():
        if each.endswith(without):
            continue
        data = whole.read(each).view("f4").reshape(entry.shape)
        kind = GGMLQuantizationType.F32
        if each.endswith(mxfp4):
            kind = GGMLQuantizationType.MXFP4
            data = quantize(data, kind)
        writer.add_tensor(each, data, raw_dtype=kind)
    for each, tensor in (tensors or {}).items():
        writer.add_tensor(each, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _copy_metadata(metadata: Mapping[str, Any], writer: Any) -> None:
    import numpy as np

    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, (list, np.ndarray)):
            writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
