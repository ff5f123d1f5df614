"""Model families from 2019 to 2023, which store queries, keys and values in one matrix."""

from __future__ import annotations

from bridle.gguf.family import GgufFamily
from bridle.gguf.rules import HEAD, Change, Order, TensorRule, layer, moved

_NO_WIDTH = frozenset({"feed_forward_length"})
_UNROTATED = _NO_WIDTH | {"rope"}


def _layers(prefix: str, *rules: TensorRule) -> tuple[TensorRule, ...]:
    """Return the tensor rules for layers whose names in transformers begin with `prefix`."""
    return moved(rules, "model.layers", prefix)


def _top(prefix: str, embedding: str, norm: str) -> tuple[TensorRule, ...]:
    return (
        TensorRule(f"{prefix}.{embedding}", ("token_embd",)),
        TensorRule(f"{prefix}.{norm}", ("output_norm",)),
        HEAD,
    )


def _joined(names: str, order: Order = "", change: Change = "") -> tuple[TensorRule, ...]:
    """Return the tensor rules of a layer's four matrices, whose names in transformers are `names`."""
    files = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return tuple(
        layer(name, file, change, order if file == "attn_qkv" else "")
        for name, file in zip(names.split(), files, strict=True)
    )


def _norms(before: str, after: str) -> tuple[TensorRule, ...]:
    return (layer(before, "attn_norm"), layer(after, "ffn_norm"))


def _gpt_2(change: Change = "") -> tuple[TensorRule, ...]:
    return (
        *_top("transformer", "wte", "ln_f"),
        TensorRule("transformer.wpe", ("position_embd",)),
        *_layers(
            "transformer.h",
            *_joined("attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj", change=change),
            *_norms("ln_1", "ln_2"),
        ),
    )


_ATTENTION = "self_attention.query_key_value self_attention.dense"
_NETWORK = "mlp.dense_h_to_4h mlp.dense_4h_to_h"
OLDER_FAMILIES = (
    GgufFamily(
        "gpt2",
        "gpt2",
        _gpt_2("turned"),
        layer_norm="layer_norm_epsilon",
        reads=("four times as wide", "equal heads"),
        constants=(
            ("activation_function", "gelu_new"),
            ("scale_attn_weights", True),
            ("scale_attn_by_inverse_layer_idx", False),
        ),
        lacks=_UNROTATED,
    ),
    GgufFamily(
        "starcoder",
        "gpt_bigcode",
        _gpt_2(),
        layer_norm="layer_norm_epsilon",
        reads=("four times as wide", "one key head"),
        constants=(("activation_function", "gelu_pytorch_tanh"), ("scale_attn_weights", True)),
        lacks=_UNROTATED,
    ),
    GgufFamily(
        "gptneox",
        "gpt_neox",
        (
            *_top("gpt_neox", "embed_in", "final_layer_norm"),
            *_layers(
                "gpt_neox.layers",
                *_joined(f"attention.query_key_value attention.dense {_NETWORK}", "by head"),
                *_norms("input_layernorm", "post_attention_layernorm"),
            ),
        ),
        layer_norm="layer_norm_eps",
        reads=("half rotated", "equal heads", "residual"),
    ),
    GgufFamily(
        "falcon",
        "falcon",
        (
            *_top("transformer", "word_embeddings", "ln_f"),
            *_layers(
                "transformer.h",
                *_joined(f"{_ATTENTION} {_NETWORK}", "by head"),
                layer("input_layernorm", "attn_norm"),
                layer("ln_mlp", "attn_norm"),
                layer("ln_attn", "attn_norm_2"),
            ),
        ),
        layer_norm="layer_norm_epsilon",
        reads=("four times as wide", "groups of heads"),
        constants=(("alibi", False), ("bias", False), ("parallel_attn", True), ("activation", "gelu")),
        lacks=_NO_WIDTH,
    ),
    GgufFamily(
        "bloom",
        "bloom",
        (
            *_top("transformer", "word_embeddings", "ln_f"),
            TensorRule("transformer.word_embeddings_layernorm", ("token_embd_norm",)),
            *_layers(
                "transformer.h",
                *_joined(f"{_ATTENTION} {_NETWORK}", "by head"),
                *_norms("input_layernorm", "post_attention_layernorm"),
            ),
        ),
        layer_norm="layer_norm_epsilon",
        reads=("four times as wide", "equal heads"),
        constants=(("apply_residual_connection_post_layernorm", False),),
        lacks=_UNROTATED,
    ),
    GgufFamily(
        "mpt",
        "mpt",
        (
            *_top("transformer", "wte", "norm_f"),
            *_layers(
                "transformer.blocks",
                *_joined("attn.Wqkv attn.out_proj ffn.up_proj ffn.down_proj"),
                *_norms("norm_1", "norm_2"),
            ),
        ),
        layer_norm="layer_norm_epsilon",
        reads=("four times as wide", "equal heads", "biased positions"),
        lacks=_UNROTATED,
    ),
)
