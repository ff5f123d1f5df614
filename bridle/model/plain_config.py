"""Configurations of GGUF files whose models run without transformers, by the decoders of
`bridle.model.plain_decoder`."""

from __future__ import annotations

import msgspec
import torch

from bridle.model.checkpoint import Checkpoint


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of rotary positions; `rope_type` is `default` or `linear`."""

    rope_theta: float
    rope_type: str = "default"
    factor: float = 1.0


class PlainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration fields that the decoders of bridle support, under their names in transformers."""

    model_type: str
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    tie_word_embeddings: bool
    rope_parameters: dict[str, Rope]  # by the types of layers; the key "" is for all layers
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    query_pre_attn_scalar: float | None = None
    final_logit_softcapping: float | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    dtype = None  # type of the checkpoint, which only GPUs need

    @property
    def is_gemma(self) -> bool:
        return self.model_type == "gemma3_text"


#: Supported families, and the optional fields that their configurations may have.
_COMMON = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
_FAMILIES = {
    "llama": _COMMON | {"attention_bias", "mlp_bias"},
    "qwen2": _COMMON,
    "qwen3": _COMMON,
    "gemma3_text": _COMMON | {"sliding_window", "layer_types", "query_pre_attn_scalar", "final_logit_softcapping"},
}
_REQUIRED = frozenset(PlainConfig.__struct_fields__[: -len(PlainConfig.__struct_defaults__)])
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def read_plain_config(checkpoint: Checkpoint) -> PlainConfig | None:
    """Return the configuration of a GGUF file if `bridle.model.plain_decoder` supports its model and the machine has no
    GPU; None otherwise."""
    fields = checkpoint.config
    optional = _FAMILIES.get(str(fields.get("model_type")))
    if checkpoint.gguf is None or optional is None or torch.cuda.is_available() or fields.keys() - _REQUIRED - optional:
        return None
    ropes = fields.get("rope_parameters", {})
    try:
        config = msgspec.convert(
            {**fields, "rope_parameters": {"": ropes} if "rope_theta" in ropes else ropes}, PlainConfig
        )
    except msgspec.ValidationError:
        return None
    return config if _is_whole(config) else None


def _is_whole(config: PlainConfig) -> bool:
    ropes = config.rope_parameters
    if any(rope.rope_type not in ("default", "linear") for rope in ropes.values()):
        return False
    if not config.is_gemma:
        return "" in ropes
    return (
        len(config.layer_types) == config.num_hidden_layers
        and set(config.layer_types) <= _LAYER_TYPES & ropes.keys()
        and config.query_pre_attn_scalar is not None
        and config.sliding_window is not None
    )
