"""Multi-head latent attention (MLA), as in DeepSeek's models: keys and values are made from one short vector per token.
This module converts MLA's sizes, and the matrix that computes keys and values. A file describes MLA as llama.cpp
computes it, with one key head that all query heads share. So the file has the key-value matrix in two halves, and the
half for keys is transposed for each head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put
from bridle.gguf.shards import GgufModel

if TYPE_CHECKING:
    from torch import Tensor


def read_latent(model: GgufModel, arch: str, config: Config) -> None:
    """Read the sizes of attention heads. Old files, whose key-value matrix is not split, have the head sizes under
    other metadata keys."""
    key = model.integer(f"{arch}.attention.key_length", low=1, high=MAX_SIDE)
    key = model.integer(f"{arch}.attention.key_length_mla", key, 1, MAX_SIDE)
    value = config["hidden_size"] // config["num_attention_heads"]  # of MiniCPM 3, whose files lack it
    value = model.integer(f"{arch}.attention.value_length", value, 1, MAX_SIDE)
    rotated = model.integer(f"{arch}.rope.dimension_count", low=1, high=MAX_SIDE)
    if rotated >= key:
        raise UnsupportedModel(f"{model.path} rotates {rotated} of the {key} values of each key; fewer must be rotated")
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": model.integer(f"{arch}.attention.value_length_mla", value, 1, MAX_SIDE),
        "kv_lora_rank": model.integer(f"{arch}.attention.kv_lora_rank", low=1, high=MAX_SIDE),
        "q_lora_rank": model.integer(f"{arch}.attention.q_lora_rank", 0, 0, MAX_SIDE) or None,
    }


def write_latent(config: Any, put: Put) -> None:
    rank, rotated = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
    if config.num_key_value_heads != config.num_attention_heads:
        raise UnsupportedModel("a GGUF file of this family needs as many key heads as query heads")
    put("attention.head_count_kv", 1)
    put("attention.key_length", rank + rotated)
    put("attention.value_length", rank)
    put("attention.key_length_mla", int(config.qk_nope_head_dim) + rotated)
    put("attention.value_length_mla", int(config.v_head_dim))
    put("attention.kv_lora_rank", rank)
    if getattr(config, "q_lora_rank", None):
        put("attention.q_lora_rank", int(config.q_lora_rank))


def write_whole_latent(config: Any, put: Put) -> None:
    """Write the head sizes for a family whose files store the key-value matrix unsplit, as transformers does."""
    put("attention.head_count_kv", int(config.num_key_value_heads))
    put("attention.key_length", int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim))
    put("attention.value_length", int(config.v_head_dim))
    put("attention.kv_lora_rank", int(config.kv_lora_rank))
    put("attention.q_lora_rank", int(config.q_lora_rank))


def joined_latent(keys: Tensor, values: Tensor) -> Tensor:
    """Join the halves [H, rank, key] and [H, value, rank] to the matrix [H (key + value), rank]."""
    import torch

    return torch.cat((keys.mT, values), 1).flatten(0, 1)


def cut_latent(matrix: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Split a key-value matrix into the two halves that `joined_latent` takes; the halves are views of the matrix."""
    heads = matrix.view(config.num_attention_heads, -1, matrix.shape[-1])
    return heads[:, : config.qk_nope_head_dim].mT, heads[:, config.qk_nope_head_dim :]
