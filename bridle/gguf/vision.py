"""Reads vision towers from GGUF files (`mmproj`), which llama.cpp keeps next to the file of the text model. This module
reads the configuration of model and tower and the settings of the image processor. The module also maps the names of
the tower's weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config
from bridle.gguf.shards import GgufModel
from bridle.safe_repr import short_repr

#: A pattern for a weight's name in transformers (in the model without its head), and the names in the file that replace
#: it. Rows of several tensors are concatenated.
Rename = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """A family of vision towers. `models` maps the text file's architecture to the model types of the whole model and
    of its text part. `marks` maps configuration fields to the texts of marker tokens."""

    models: Mapping[str, tuple[str, str]]
    marks: Mapping[str, str]
    vision: Callable[[GgufModel], Config]
    fields: Callable[[GgufModel], Config]
    processor: Callable[[GgufModel], Config]
    names: tuple[Rename, ...]


def tower_beside(path: Path) -> Path | None:
    """Return the only file with a vision tower in the folder of a model; None if the folder has no such file or
    several."""
    try:
        found = [each for each in path.parent.glob("*.gguf") if "mmproj" in each.name.lower() and each != path]
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def family_of(tower: GgufModel) -> TowerFamily:
    """Return the family of a tower. Raises `UnsupportedModel` for an unknown tower."""
    kind = tower.text("clip.projector_type") or tower.text("clip.vision.projector_type") or ""
    if kind not in _FAMILIES:
        raise UnsupportedModel(
            f"{tower.path} has the unknown projector type {short_repr(kind)}; known are {', '.join(sorted(_FAMILIES))}"
        )
    return _FAMILIES[kind]


def with_tower(model: GgufModel, text: Config, tower: GgufModel) -> tuple[Config, Config]:
    """Return the configuration of a model with its tower, and that of its image processor. `text` is the configuration
    of the text part. Raises `UnsupportedModel` if model and tower do not fit together."""
    family = family_of(tower)
    arch = model.text("general.architecture") or ""
    names = family.models.get(arch)
    if names is None:
        raise UnsupportedModel(f"vision tower {tower.path} does not fit {model.path}, whose architecture is {arch!r}")
    if tower.integer("clip.vision.projection_dim", text["hidden_size"], 1, MAX_SIDE) != text["hidden_size"]:
        raise UnsupportedModel(f"vision tower {tower.path} has another embedding size than {model.path}")
    whole, own = names
    inner = {**text, "model_type": own}
    sections = [int(each) for each in model.numbers(f"{arch}.rope.dimension_sections")]
    if any(sections):
        inner["rope_parameters"] = {**text["rope_parameters"], "mrope_section": sections[:3]}
    config = {
        "model_type": whole,
        "text_config": inner,
        "vision_config": family.vision(tower),
        "tie_word_embeddings": text["tie_word_embeddings"],
        **{field: _token(model, mark) for field, mark in family.marks.items()},
        **family.fields(tower),
    }
    return config, {**_normalization(tower), **family.processor(tower)}


def file_names(family: TowerFamily, name: str, tower: GgufModel) -> tuple[str, ...]:
    """Return the names of the file's tensors for the weight that transformers calls `name`. Raises `UnsupportedModel`
    if the file has no such tensors."""
    for pattern, files in family.names:
        if (found := re.fullmatch(pattern, name)) is None:
            continue
        named = tuple(found.expand(file) for file in files)
        if all(file in tower.tensors for file in named):
            return named
    raise UnsupportedModel(f"{tower.path} lacks the weight {name!r}")


def deepstack_layers(tower: GgufModel) -> list[int]:
    """Return the tower's layers whose outputs are added to the first layers of the text part (DeepStack)."""
    flags = tower.metadata.get("clip.vision.is_deepstack_layers", [])
    return [int(number) for number in np.flatnonzero(np.asarray(flags, dtype=bool))]


def _token(model: GgufModel, text: str) -> int:
    try:
        return model.texts("tokenizer.ggml.tokens").index(text)
    except ValueError:
        raise UnsupportedModel(f"{model.path} has no token {text!r}, which prompts with images need") from None


def _normalization(tower: GgufModel) -> Config:
    keys = {"image_mean": "clip.vision.image_mean", "image_std": "clip.vision.image_std"}
    return {field: [float(each) for each in tower.numbers(key)] for field, key in keys.items() if key in tower.metadata}


def _size(tower: GgufModel, key: str, default: int | None = None) -> int:
    return tower.integer(f"clip.vision.{key}", default, 1, MAX_SIDE)


# -- SigLIP: Gemma 3, and Idefics 3 with SmolVLM ---------------------------------------------------------------------


def _siglip(tower: GgufModel) -> Config:
    return {"model_type": "siglip_vision_model", **_siglip_sizes(tower), "vision_use_head": False}


def _siglip_sizes(tower: GgufModel) -> Config:
    return {
        "hidden_size": _size(tower, "embedding_length"),
        "intermediate_size": _size(tower, "feed_forward_length"),
        "num_hidden_layers": _size(tower, "block_count"),
        "num_attention_heads": _size(tower, "attention.head_count"),
        "image_size": _size(tower, "image_size"),
        "patch_size": _size(tower, "patch_size"),
        "layer_norm_eps": tower.real("clip.vision.attention.layer_norm_epsilon", 1e-6),
    }


def _gemma_rows(tower: GgufModel) -> int:
    side = _size(tower, "image_size") // _size(tower, "patch_size")
    return max(int((side // _size(tower, "projector.scale_factor", 4)) ** 2), 1)


def _gemma_processor(tower: GgufModel) -> Config:
    side = _size(tower, "image_size")
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
        "image_seq_length": _gemma_rows(tower),
    }


def _idefics_processor(tower: GgufModel) -> Config:
    side = _size(tower, "image_size")
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": _size(tower, "preproc_image_size", 4 * side)},
        "max_image_size": {"longest_edge": side},
    }


_EYE = r"(?:vision_tower|vision_model)\.(?:vision_model\.)?"
_BLOCK = _EYE + r"encoder\.layers\.(\d+)\."
_SIGLIP_NAMES: tuple[Rename, ...] = (
    (_EYE + r"embeddings\.patch_embedding\.(\w+)", (r"v.patch_embd.\1",)),
    (_EYE + r"embeddings\.position_embedding\.weight", ("v.position_embd.weight",)),
    (_EYE + r"post_layernorm\.(\w+)", (r"v.post_ln.\1",)),
    (_BLOCK + r"self_attn\.([qkv])_proj\.(\w+)", (r"v.blk.\1.attn_\2.\3",)),
    (_BLOCK + r"self_attn\.out_proj\.(\w+)", (r"v.blk.\1.attn_out.\2",)),
    (_BLOCK + r"layer_norm([12])\.(\w+)", (r"v.blk.\1.ln\2.\3",)),
    (_BLOCK + r"mlp\.fc1\.(\w+)", (r"v.blk.\1.ffn_up.\2",)),
    (_BLOCK + r"mlp\.fc2\.(\w+)", (r"v.blk.\1.ffn_down.\2",)),
    (r"multi_modal_projector\.mm_input_projection_weight", ("mm.input_projection.weight",)),
    (r"multi_modal_projector\.mm_soft_emb_norm\.weight", ("mm.soft_emb_norm.weight",)),
    (r"connector\.modality_projection\.proj\.weight", ("mm.model.fc.weight",)),
)

# -- Qwen ------------------------------------------------------------------------------------------------------------

_QWEN_MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def _qwen3(tower: GgufModel) -> Config:
    side = _size(tower, "image_size") // _size(tower, "patch_size")
    return {
        "hidden_size": _size(tower, "embedding_length"),
        "intermediate_size": _size(tower, "feed_forward_length"),
        "depth": _size(tower, "block_count"),
        "num_heads": _size(tower, "attention.head_count"),
        "patch_size": _size(tower, "patch_size"),
        "spatial_merge_size": _size(tower, "spatial_merge_size", 2),
        "num_position_embeddings": side * side,
        "deepstack_visual_indexes": deepstack_layers(tower),
        "out_hidden_size": _size(tower, "projection_dim"),
    }


def _qwen_processor(least: int, most: int) -> Callable[[GgufModel], Config]:
    """Return a function that reads the image processor's settings. `least` and `most` bound the rows of an image,
    because files do not state bounds."""

    def read(tower: GgufModel) -> Config:
        patch, merged = _size(tower, "patch_size"), _size(tower, "spatial_merge_size", 2)
        pixels = (patch * merged) ** 2
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": patch,
            "merge_size": merged,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": least * pixels, "longest_edge": most * pixels},
        }

    return read


_QWEN_BLOCK = r"visual\.blocks\.(\d+)\."
_QWEN_NAMES: tuple[Rename, ...] = (
    (r"visual\.patch_embed\.proj\.weight", ("v.patch_embd.weight", "v.patch_embd.weight.1")),
    (r"visual\.patch_embed\.proj\.bias", ("v.patch_embd.bias",)),
    (r"visual\.pos_embed\.weight", ("v.position_embd.weight",)),
    (_QWEN_BLOCK + r"norm([12])\.(\w+)", (r"v.blk.\1.ln\2.\3",)),
    (_QWEN_BLOCK + r"attn\.qkv\.(\w+)", (r"v.blk.\1.attn_qkv.\2",)),
    (_QWEN_BLOCK + r"attn\.qkv\.(\w+)", tuple(rf"v.blk.\1.attn_{part}.\2" for part in "qkv")),
    (_QWEN_BLOCK + r"attn\.proj\.(\w+)", (r"v.blk.\1.attn_out.\2",)),
    (_QWEN_BLOCK + r"mlp\.(?:linear_fc1|fc1|up_proj)\.(\w+)", (r"v.blk.\1.ffn_up.\2",)),
    (_QWEN_BLOCK + r"mlp\.gate_proj\.(\w+)", (r"v.blk.\1.ffn_gate.\2",)),
    (_QWEN_BLOCK + r"mlp\.(?:linear_fc2|fc2|down_proj)\.(\w+)", (r"v.blk.\1.ffn_down.\2",)),
    (r"visual\.merger\.(?:norm|ln_q)\.(\w+)", (r"v.post_ln.\1",)),
    (r"visual\.merger\.(?:linear_fc1|mlp\.0)\.(\w+)", (r"mm.0.\1",)),
    (r"visual\.merger\.(?:linear_fc2|mlp\.2)\.(\w+)", (r"mm.2.\1",)),
    (r"visual\.deepstack\.(\d+)\.norm\.(\w+)", (r"v.deepstack.\1.norm.\2",)),
    (r"visual\.deepstack\.(\d+)\.linear_fc([12])\.(\w+)", (r"v.deepstack.\1.fc\2.\3",)),
)


def _qwen2(tower: GgufModel) -> Config:
    width, inner = _size(tower, "embedding_length"), tower.tensors.get("v.blk.0.ffn_up.bias")
    if inner is None:  # `feed_forward_length` is that of the text
        raise UnsupportedModel(f"{tower.path} lacks tensor 'v.blk.0.ffn_up.bias'")
    return {
        "embed_dim": width,
        "hidden_size": _size(tower, "projection_dim"),
        "mlp_ratio": inner.num_values // width,
        "depth": _size(tower, "block_count"),
        "num_heads": _size(tower, "attention.head_count"),
        "patch_size": _size(tower, "patch_size"),
        "spatial_merge_size": _size(tower, "spatial_merge_size", 2),
    }


def _qwen25(tower: GgufModel) -> Config:
    depth, pattern = _size(tower, "block_count"), _size(tower, "n_wa_pattern")
    return {
        "hidden_size": _size(tower, "embedding_length"),
        "intermediate_size": _size(tower, "feed_forward_length"),
        "depth": depth,
        "num_heads": _size(tower, "attention.head_count"),
        "patch_size": _size(tower, "patch_size"),
        "spatial_merge_size": _size(tower, "spatial_merge_size", 2),
        "fullatt_block_indexes": [*range(pattern - 1, depth, pattern)],
        "out_hidden_size": _size(tower, "projection_dim"),
    }


_GEMMA3 = TowerFamily(
    models={"gemma3": ("gemma3", "gemma3_text")},
    marks={
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    vision=_siglip,
    fields=lambda tower: {"mm_tokens_per_image": _gemma_rows(tower)},
    processor=_gemma_processor,
    names=_SIGLIP_NAMES,
)
_IDEFICS3 = TowerFamily(
    models={"llama": ("idefics3", "llama")},
    marks={"image_token_id": "<image>"},
    vision=_siglip_sizes,
    fields=lambda tower: {"scale_factor": _size(tower, "projector.scale_factor", 2)},
    processor=_idefics_processor,
    names=_SIGLIP_NAMES,
)
_QWEN3 = TowerFamily(
    models={
        "qwen3vl": ("qwen3_vl", "qwen3_vl_text"),
        "qwen3vlmoe": ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        "qwen35": ("qwen3_5", "qwen3_5_text"),
        "qwen35moe": ("qwen3_5_moe", "qwen3_5_moe_text"),
    },
    marks=_QWEN_MARKS,
    vision=_qwen3,
    fields=lambda tower: {},
    processor=_qwen_processor(64, 16_384),
    names=_QWEN_NAMES,
)
_QWEN2 = TowerFamily(
    models={"qwen2vl": ("qwen2_vl", "qwen2_vl_text")},
    marks=_QWEN_MARKS,
    vision=_qwen2,
    fields=lambda tower: {},
    processor=_qwen_processor(4, 1280),
    names=_QWEN_NAMES,
)
_QWEN25 = TowerFamily(
    models={"qwen2vl": ("qwen2_5_vl", "qwen2_5_vl_text")},
    marks=_QWEN_MARKS,
    vision=_qwen25,
    fields=lambda tower: {},
    processor=_qwen_processor(4, 1280),
    names=_QWEN_NAMES,
)
#: Families of towers by `clip.projector_type`.
_FAMILIES = {
    "gemma3": _GEMMA3,
    "idefics3": _IDEFICS3,
    "qwen3vl_merger": _QWEN3,
    "qwen2vl_merger": _QWEN2,
    "qwen2.5vl_merger": _QWEN25,
}
