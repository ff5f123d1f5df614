"""Models of well-known shapes with random weights, made on the device that runs them; nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from bridle.config import ModelConfig
from bridle.model import attention
from bridle.model.buffers import fill_buffers
from bridle.model.checkpoint import Checkpoint
from bridle.model.executor import LocalExecutor
from bridle.model.executor_builder import build_executor
from bridle.model.kv_cache import token_bytes
from bridle.model.loader import prepare_model

_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
#: Settings of the library's Qwen3, by the name of the size.
SHAPES: dict[str, dict[str, Any]] = {
    "toy": {
        **_QWEN3,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2_048,
        "tie_word_embeddings": True,
    },
    "0.6b": {
        **_QWEN3,
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_QWEN3,
        "hidden_size": 4_096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
_SPREAD = 0.02
_BLOCK = 16
#: Set aside for adapters: only then steps with some get graphs.
_RESERVED = 2 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """Quantities that limit a model's speed: bytes read per step, bytes of keys and values per token, and matrix
    weights that each prompt token is multiplied by."""

    step_bytes: int
    token_bytes: int
    matrix_weights: int


def token_bytes_of(name: str, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token, before a model is made."""
    shape = SHAPES[name]
    return 2 * dtype.itemsize * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]  # type: ignore[no-any-return]


def settings_of(name: str) -> PreTrainedConfig:
    """Return transformers' configuration of the size called `name`."""
    return AutoConfig.for_model("qwen3", bos_token_id=1, eos_token_id=2, **SHAPES[name])


def make_model(name: str, device: torch.device, dtype: torch.dtype, attention_name: str) -> nn.Module:
    """Return a transformers model with random matrices and norm weights of 1."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            settings_of(name), attn_implementation=attention_name, dtype=dtype
        )
    fill_buffers(model)
    made: dict[int, nn.Parameter] = {}  # a head may share the embedding's weight
    for module in model.modules():
        for field, empty in list(module._parameters.items()):
            if empty is not None:
                module._parameters[field] = made.setdefault(id(empty), _fill(empty, device))
    return model.requires_grad_(False).eval().to(device)  # type: ignore[no-any-return]


def _fill(empty: nn.Parameter, device: torch.device) -> nn.Parameter:
    tensor = torch.empty(empty.shape, dtype=empty.dtype, device=device)
    tensor = tensor.normal_(0.0, _SPREAD) if tensor.dim() > 1 else tensor.fill_(1.0)
    return nn.Parameter(tensor, requires_grad=False)


def make_executor(
    name: str, device: torch.device, dtype: torch.dtype, *, num_tokens: int, num_seqs: int
) -> tuple[LocalExecutor, Sizes]:
    """Return an executor over the size called `name`, with KV for the given numbers of sequences and tokens, and the
    model's sizes."""
    attention.register()
    model = make_model(name, device, dtype, attention.ATTENTION_NAME)
    config = ModelConfig(
        model=name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        block_size=_BLOCK,
        num_blocks=-(-num_tokens // _BLOCK) + 2 * num_seqs,
        step_seqs=num_seqs,
        max_model_len=min(num_tokens, SHAPES[name]["max_position_embeddings"]),
        reserved_memory=_RESERVED if device.type == "cuda" else None,
    )
    parameters = {id(weight): weight for weight in model.parameters()}
    num_values = sum(weight.numel() for weight in parameters.values())
    num_bytes = sum(weight.nbytes for weight in parameters.values())
    embedding: Any = model.get_input_embeddings().weight  # type: ignore[operator]
    is_tied = model.config.tie_word_embeddings  # type: ignore[union-attr]
    checkpoint = Checkpoint(Path(name), {}, (), num_values, num_bytes)
    loaded = prepare_model(config, checkpoint, settings_of(name), model, dtype, device)
    sizes = Sizes(
        step_bytes=num_bytes - (0 if is_tied else embedding.nbytes),
        token_bytes=token_bytes(loaded.geometry, dtype),
        matrix_weights=num_values - embedding.numel() * (1 if is_tied else 2),  # of prompts one row meets the head
    )
    return build_executor(loaded, None), sizes
