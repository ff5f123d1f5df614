"""The first check of a model: refuses models because of their configuration. `geometry` has the second check, and
`parity` the third. A refused model is better than a model that loads and gives wrong results. So a model is refused if
its results depend on anything other than attention over past tokens and supported recurrent layers. The error's message
has the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.gguf.folder import REFUSED
from bridle.model.checkpoint import Checkpoint
from bridle.model.quantization.schemes import read_scheme

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Families whose packed, paged results were compared with their own eager attention, in the test-suite or manually.
#: Other families are compared while loading.
KNOWN_FAMILIES = frozenset(
    {
        "bloom",
        "codegen",
        "cohere",
        "cohere2",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gpt_neox_japanese",
        "gpt_oss",
        "gptj",
        "granite",
        "helium",
        "llama",
        "llama4_text",
        "ministral",
        "mistral",
        "mixtral",
        "mpt",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "openai-gpt",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
        "xglm",
    }
)

#: Compared families with recurrent layers.
RECURRENT_FAMILIES = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zamba",
        "zamba2",
    }
)

#: Compared families whose attention selects keys by an index.
INDEXED_FAMILIES = frozenset(
    {"axk2", "deepseek_v32", "dots3_note_text", "glm5_next_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text"}
)

#: Compared families whose attention reads compressed windows of tokens.
COMPRESSED_FAMILIES = frozenset({"deepseek_v4"})

#: Families that also take images, whose text was compared with the whole model's own in the test-suite. Other families
#: are compared while loading.
VISION_FAMILIES = frozenset(
    {
        "aya_vision",
        "cohere2_vision",
        "cohere_compass",
        "deepseek_ocr2",
        "ernie4_5_vl_moe",
        "exaone4_5",
        "gemma3",
        "gemma4",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "hyperclovax_vision_v2",
        "idefics3",
        "internvl",
        "kimi_k25",
        "lfm2_vl",
        "lfm3_vl",
        "lighton_ocr",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "ovis2",
        "paddleocr_vl",
        "paligemma",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)

#: Compared families that also take sound.
HEARING_FAMILIES = frozenset({"voxtral"})

#: Families of text only, for which the tables of transformers need not be read.
TEXT_FAMILIES = frozenset({"gemma3_text", "llama", "qwen2", "qwen3"})

_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
#: Layers that keep a state of each sequence, with or without keys and values.
_STATE_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"})
#: Layers that also attend to entries, each of which represents a window of tokens.
_COMPRESSED_LAYERS = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
#: Layers that compute each token separately.
_LOCAL_LAYERS = frozenset({"moe", "mlp"})
_LAYER_REASONS = {
    "chunked_attention": "its attention is cut into chunks, which is known of Llama 4 alone",
    "indexed_attention": "it selects keys by an index of its own, which is not known for this family",
}
_RECURRENT = "it is recurrent: its state is not kept in the paged cache"
_REFUSED = dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), _RECURRENT)


#: Model types that compute the same as a model type of transformers, with the same names of weights and fields.
_SAME = {"kimi_k2": "deepseek_v3"}
#: Model types of which only the text part is read, because their tower needs packages that bridle does not install.
_TEXT_ALONE = frozenset({"gemma3n"})


def read_config(checkpoint: Checkpoint, pools: bool = False) -> PreTrainedConfig:
    """Return the transformers configuration of a checkpoint after this module's checks. With `pools`, the model need
    not be a decoder. Raises `UnsupportedModel` if the model cannot be served."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    name = checkpoint.config.get("model_type")
    if checkpoint.gguf is not None and REFUSED in checkpoint.config:
        raise UnsupportedModel(str(checkpoint.config[REFUSED]))
    known = MODEL_MAPPING_NAMES if pools else _writing_families()
    if "auto_map" in checkpoint.config and name not in known | _SAME.keys():
        raise UnsupportedModel(f"model type {name!r} needs Python code from the checkpoint, which bridle never runs")
    try:
        config = _other_config(checkpoint.config) or AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise UnsupportedModel(f"{checkpoint.folder / 'config.json'} cannot be used: {error}") from error
    if pools:
        check_kind(config)
    else:
        check_structure(config)
    return config


def serving_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the configuration of a model to serve. If the model can run without transformers, this is bridle's own
    `PlainConfig`, which has the same fields. For all other models, return the result of `read_config`."""
    from bridle.model.plain_config import read_plain_config

    plain: Any = read_plain_config(checkpoint)
    return read_config(checkpoint) if plain is None else plain


def _other_config(fields: Mapping[str, Any]) -> PreTrainedConfig | None:
    """Return the configuration of a checkpoint whose model type is treated as another type; None for all other model
    types."""
    from transformers import CONFIG_MAPPING

    name = str(fields.get("model_type"))
    if name in _SAME:
        return CONFIG_MAPPING[_SAME[name]].from_dict({**fields, "model_type": _SAME[name]})
    if name in _TEXT_ALONE:
        text = {"model_type": f"{name}_text", **fields.get("text_config", {})}
        return CONFIG_MAPPING[text["model_type"]].from_dict(text)
    return None


def _writing_families() -> set[str]:
    """Return the families for which transformers has a class that generates text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *multimodal_families()}


def multimodal_families() -> set[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def takes_media(config: PreTrainedConfig) -> bool:
    """Return whether the model belongs to a family that takes images or sound besides text."""
    if config.model_type in TEXT_FAMILIES:
        return False
    return config.model_type in multimodal_families()


def is_compared(config: PreTrainedConfig) -> bool:
    """Return whether this family is in the list of families whose results were compared with transformers. A family
    outside of this list is compared with transformers while a model is loaded."""
    if takes_media(config) and config.model_type not in VISION_FAMILIES | HEARING_FAMILIES:
        return False
    compared = KNOWN_FAMILIES | RECURRENT_FAMILIES | INDEXED_FAMILIES | COMPRESSED_FAMILIES
    return text_config(config).model_type in compared


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the part that reads and writes text; for most models, the whole configuration."""
    return config.get_text_config(decoder=True) if takes_media(config) else config


def num_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers in the part of the model that writes text."""
    found = getattr(text_config(config), "num_hidden_layers", None)
    if not isinstance(found, int):
        raise UnsupportedModel(
            f"model type {config.model_type!r} has no 'num_hidden_layers': it is not one stack of text layers"
        )
    return found


def num_mixing_layers(config: PreTrainedConfig) -> int:
    """Return the number of the model's layers that mix tokens, by attention or by a recurrent state."""
    kinds = getattr(text_config(config), "layer_types", None) or ()
    return num_layers(config) - sum(kind in _LOCAL_LAYERS for kind in kinds)


def check_kind(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` unless the model is a single stack of layers over text."""
    name = config.model_type
    _check_one_stack(name, config)
    for part in ("vision_config", "audio_config", "vq_config"):
        if getattr(config, part, None) is not None:
            raise UnsupportedModel(
                f"model type {name!r} also takes {part.removesuffix('_config')} input, and transformers here has no "
                "class for its text part"
            )
    if name in _REFUSED:
        raise UnsupportedModel(f"model type {name!r} cannot be served: {_REFUSED[name]}")


def _check_one_stack(name: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"model type {name!r} is an encoder-decoder; bridle serves only decoders and encoders")


def check_structure(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` unless the model, or its text part, is a plain decoder of text."""
    name = config.model_type
    if takes_media(config):
        text = text_config(config)
        for part in (config, text):
            _check_one_stack(name, part)
        _check_text_part(name, text)
        num_layers(config)
        if getattr(config, "quantization_config", None) is not None:
            read_scheme(config.quantization_config)
        return
    check_kind(config)
    if name not in _writing_families():
        raise UnsupportedModel(f"model type {name!r} is no causal language model that this transformers version knows")
    if getattr(config, "quantization_config", None) is not None:
        read_scheme(config.quantization_config)
    _check_layer_types(name, config)
    num_layers(config)


def _check_text_part(name: str, config: PreTrainedConfig) -> None:
    if getattr(config, "cross_attention_layers", None):
        raise UnsupportedModel(f"model type {name!r} attends to images in separate layers (cross attention)")
    if config.model_type in _REFUSED:
        raise UnsupportedModel(
            f"model type {name!r} generates text with {config.model_type!r}, which cannot be served: "
            f"{_REFUSED[config.model_type]}"
        )
    if name == "qwen3_vl_moe":
        _check_experts(name, config.hidden_size, config.moe_intermediate_size)
    _check_layer_types(name, config)


def _check_experts(name: str, size: int, inner: int) -> None:
    """Raise `UnsupportedModel` if the experts' matrices are square. Files of this family may store matrices transposed,
    which only the shapes show."""
    if size in (inner, 2 * inner):
        raise UnsupportedModel(
            f"model type {name!r} has experts of size {inner} at a hidden size of {size}: their matrices are "
            "square, so it is unclear whether a file has them transposed"
        )


def _check_layer_types(name: str, config: PreTrainedConfig) -> None:
    known = _PLAIN_LAYERS | _STATE_LAYERS | _LOCAL_LAYERS
    known |= {"chunked_attention"} if config.model_type == "llama4_text" else set()
    known |= {"indexed_attention"} if config.model_type in INDEXED_FAMILIES else set()
    known |= _COMPRESSED_LAYERS if config.model_type in COMPRESSED_FAMILIES else set()
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in known:
            reason = _LAYER_REASONS.get(kind, "only full and sliding-window attention can be served")
            raise UnsupportedModel(f"model type {name!r} has layers of type {kind!r}: {reason}")


def max_positions(config: PreTrainedConfig) -> int:
    """Return the maximum number of positions in the configuration; 2,048 if the configuration has no limit."""
    config = text_config(config)
    for field in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2048


def choose_max_model_len(config: PreTrainedConfig, wanted: int | None) -> int:
    """Return the context length to serve: `wanted`, or the model's own limit if `wanted` is None.

    Raises `InvalidRequest` if `wanted` exceeds the number of positions of the model.
    """
    limit = max_positions(config)
    if wanted is None or wanted <= limit:
        return wanted or limit
    if "dynamic" in rope_types(text_config(config)):
        return wanted
    raise InvalidRequest(
        f"max_model_len (or max_total_tokens) is {wanted}; the model supports at most {limit}", "max_model_len"
    )


def rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the names of all rotary scalings that layers use."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return set()
    parts = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    return {str(part.get("rope_type", "default")) for part in parts}
