"""Make tiny random checkpoints: one Hugging Face folder per model family, written in a fraction of a second.

With the random weights, the next token depends on the whole context and wins by a wide margin. So a wrong position, a
lost key or another sequence's KV changes the output, and rounding does not. The tokenizer has one token per byte.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.fakes.made_once import made_once, shared_folder

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
_NAMED_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
VOCAB_SIZE = 300
BOS, EOS, PAD = 1, 2, 0
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_DENSE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_SLIDING: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}
_CAPPED: dict[str, Any] = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}

#: What each family's configuration needs beside the common fields; None drops a field.
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 48, "n_layer": 3, "n_head": 6},
    "codegen": {**_GPT, "n_ctx": 512, "rotary_dim": 4},
    "cohere": {**_DENSE, "logit_scale": 1.0},
    "cohere2": {**_DENSE, **_SLIDING, "logit_scale": 1.0},
    "falcon": {
        **_DENSE,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_key_value_heads": None,
        "head_dim": None,
    },
    "gemma": _DENSE,
    "gemma2": {**_DENSE, **_SLIDING, **_CAPPED, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_DENSE, **_SLIDING, "query_pre_attn_scalar": 8},
    "glm4": {**_DENSE, "pad_token_id": PAD},
    "gpt2": _GPT,
    "gpt_bigcode": {**_GPT, "multi_query": True},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "max_position_embeddings": 512,
        "window_size": 12,
        "attention_types": [[["global", "local", "global"], 1]],
    },
    "gpt_neox": {**_DENSE, "num_key_value_heads": None, "head_dim": None},
    "gpt_neox_japanese": {**_DENSE, "num_key_value_heads": None, "head_dim": None},
    "gptj": {**_GPT, "rotary_dim": 4},
    "gpt_oss": {**_DENSE, **_SLIDING, **_MOE},
    "granite": {**_DENSE, "logits_scaling": 1.0},
    "helium": _DENSE,
    "llama": _DENSE,
    "llama4_text": {
        **_DENSE,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 24,
        "no_rope_layers": [1, 0, 1],
        "floor_scale": 16,
        "attn_scale": 0.3,
    },
    "ministral": {**_DENSE, **_SLIDING},
    "mistral": {**_DENSE, "sliding_window": 16},
    "mixtral": {**_DENSE, **_MOE},
    "mpt": {"hidden_size": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 512},
    "nemotron": _DENSE,
    "olmo": _DENSE,
    "olmo2": _DENSE,
    "olmo3": {**_DENSE, **_SLIDING},
    "olmoe": {**_DENSE, **_MOE},
    "openai-gpt": _GPT,
    "opt": {**_DENSE, "ffn_dim": 64, "word_embed_proj_dim": 32, "num_key_value_heads": None, "head_dim": None},
    "phi": _DENSE,
    "phi3": {**_DENSE, "original_max_position_embeddings": 512},
    "qwen2": _DENSE,
    "qwen2_moe": {**_DENSE, **_MOE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3": _DENSE,
    "qwen3_moe": {**_DENSE, **_MOE, "moe_intermediate_size": 32},
    "seed_oss": _DENSE,
    "smollm3": _DENSE,
    "stablelm": _DENSE,
    "starcoder2": _DENSE,
    "xglm": {"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": 512},
}

_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_SHARED_MOE: dict[str, Any] = {**_MOE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

_ZAMBA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}

#: The same for families with recurrent layers, whose short forms keep a state of each sequence.
HYBRID_FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {**_DENSE, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **_DENSE,
        **_MOE,
        "layer_types": ["conv", "full_attention", "conv"],
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "lfm3": {**_DENSE, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5_text": {**_DENSE, **_DELTA},
    "qwen3_5_moe_text": {**_DENSE, **_DELTA, **_SHARED_MOE},
    "qwen3_next": {**_DENSE, **_DELTA, **_SHARED_MOE},
    "olmo_hybrid": {**_DENSE, **_DELTA},
    "nemotron_h": {
        **_DENSE,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "num_hidden_layers": None,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "time_step_min": 1e-9,
        "chunk_size": 8,
    },
    "granitemoehybrid": {**_DENSE, **_MAMBA2, **_MOE, "shared_intermediate_size": 32, "mamba_d_ssm": None},
    "bamba": {**_DENSE, **_MAMBA2, "layer_types": None, "attn_layer_indices": [1], "mamba_d_ssm": None},
    "falcon_h1": {**_DENSE, **_MAMBA2, "layer_types": None},
    "jamba": {
        **_DENSE,
        **_MOE,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, "time_step_rank": 4},
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, "time_step_rank": 4},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "kimi_linear": {
        **_DENSE,
        **_DELTA,
        **_LATENT,
        **_MOE,
        "moe_intermediate_size": 32,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "bailing_hybrid": {
        **_DENSE,
        **_DELTA,
        **_LATENT,
        **_MOE,
        "moe_intermediate_size": 32,
        "qk_rope_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
    "minimax": {
        **_DENSE,
        **_MOE,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 8,
    },
    "zamba": {
        **_ZAMBA,
        "intermediate_size": 64,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_associative_scan": False,
    },
    "zamba2": {
        **_ZAMBA,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "time_step_min": 1e-9,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "use_mem_rope": True,
    },
}

_INDEX: dict[str, Any] = {
    **_DENSE,
    **_LATENT,
    **_MOE,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "head_dim": None,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
}
_SHARED_INDEX: dict[str, Any] = {**_INDEX, "indexer_types": ["full", "shared", "full"]}

#: The same for families whose attention selects keys by an index. It has many heads, so that no two keys score zero.
INDEXED_FAMILIES: dict[str, dict[str, Any]] = {
    "axk2": _INDEX,
    "deepseek_v32": _INDEX,
    "dots3_note_text": {
        **_INDEX,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "glm_moe_dsa": _SHARED_INDEX,
    "hy_v4": _SHARED_INDEX,
}

#: The same for families whose attention sees compressed windows of tokens.
COMPRESSED_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        **_DENSE,
        **_MOE,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "sliding_window": 16,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
        "index_topk": 4,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
    },
}
_ALL = FAMILIES | HYBRID_FAMILIES | INDEXED_FAMILIES | COMPRESSED_FAMILIES


def make_checkpoint(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of `family` (a transformers model type) into `folder`, and return `folder`.

    `overrides` replace fields of the configuration; a field set to None is left out. The same arguments give the same
    weights. Families without an entry in `FAMILIES` start from Llama-like fields.
    """
    shutil.copytree(cached_checkpoint(family, seed=seed, **overrides), folder, dirs_exist_ok=True)
    return folder


def cached_checkpoint(family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Return a folder with the checkpoint of `make_checkpoint`. All tests share the folder and must not change it."""
    key = [seed, sorted(overrides.items())]
    return shared_folder(family, key, lambda folder: _write_checkpoint(family, folder, seed, overrides))


def _write_checkpoint(family: str, folder: Path, seed: int, overrides: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    fields = {**COMMON, **_ALL.get(family, _DENSE), **overrides}
    config = AutoConfig.for_model(family, **{name: v for name, v in fields.items() if v is not None})
    with torch.random.fork_rng(devices=[]):  # a few parameters keep what the library draws, in part
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    save_tokenizer(folder)


def randomize(model: nn.Module, seed: int) -> None:
    """Set all weights to random values: activations are near one in every layer, and logits are far apart."""
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: nn.Parameter, scale: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    head = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if head is not None and parameter is head.weight and parameter is not embedding.weight:
                draw(parameter, 5.0 / math.sqrt(parameter.shape[-1]))
            elif "embed" in name or "wte" in name or "wpe" in name:
                draw(parameter, 0.7)
            elif parameter.dim() > 1:
                draw(parameter, 1.3 / math.sqrt(_fan_in(name, parameter)))
            elif "sink" in name:
                draw(parameter, 1.0)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
            elif name.endswith("tid2eid"):  # the experts of each token, all of them others
                router: Any = model.get_submodule(name.rpartition(".")[0])
                orders = torch.rand(len(buffer), router.num_experts, generator=generator).argsort(-1)
                buffer.copy_(orders[:, : buffer.shape[1]])


def _fan_in(name: str, parameter: nn.Parameter) -> int:
    """Return the number of inputs per output: the last side of a linear weight, or the middle side of transposed or
    fused weights."""
    is_transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) or parameter.dim() == 3
    return parameter.shape[-2] if is_transposed else parameter.shape[-1]


@made_once
def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with the special tokens, one token per byte, a few words and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġ", "the"), ("o", "n")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        **_NAMED_TOKENS,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
