"""Make tiny random checkpoints that take images: one Hugging Face folder per family, with the file that says how images
become model input. As in `tiny_checkpoints`, the next token depends on the whole context, images included, and wins by
a wide margin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes import tiny_checkpoints
from tests.fakes.made_once import made_once

#: The id that stands for a row of an image, the last of the vocabulary; and those around it where a family has them.
IMAGE = tiny_checkpoints.VOCAB_SIZE - 1
_START, _END, _VIDEO = IMAGE - 1, IMAGE - 2, IMAGE - 3
#: What a family calls its placeholder, and the texts of its other tokens around pictures.
_TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
_LFM_TILES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))
_GLM_NAMES = (
    *("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
_QWEN_NAMES = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
NAMES: dict[str, tuple[str, ...]] = {
    "llava_onevision": ("<image>", "<|image_start|>", "<|image_end|>", "<video>"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    "aya_vision": ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
    "qwen2_vl": _QWEN_NAMES,
    "qwen2_5_vl": _QWEN_NAMES,
    "qwen3_5": _QWEN_NAMES,
    "qwen3_5_moe": _QWEN_NAMES,
    "qwen3_vl": _QWEN_NAMES,
    "qwen3_vl_moe": _QWEN_NAMES,
    "gemma4": ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"),
    "gemma4_mutual": ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr"), _GLM_NAMES),
    **dict.fromkeys(("exaone4_5", "hyperclovax_vision_v2", "lfm3_vl"), _QWEN_NAMES),
    "cohere_compass": _QWEN_NAMES,
    "cohere2_vision": ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
    "ernie4_5_vl_moe": ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>"),
    "kimi_k25": ("<|media_pad|>", "<|media_begin|>", "<|media_end|>", "<|video_pad|>"),
    "lfm2_vl": ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *_LFM_TILES),
    "ovis2": ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    "paddleocr_vl": ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "pixtral": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "smolvlm": ("<image>", "<fake_token_around_image>", "<global-img>", *_TILES),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>", *_TILES),
}
_PLACEHOLDERS = {"<image_soft_token>": "<start_of_image>"}
#: What a chat template writes for a picture, where that is no token.
_WRITTEN = {"<|IMG_PATCH|>": "<image>", "<IMG_ATOM>": "<image>"}
#: The model types of checkpoints that are no family of their own.
MODEL_TYPES = {"gemma4_mutual": "gemma4", "paligemma2": "paligemma", "pixtral": "llava"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_VIDEO_PART = "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"

TEXT: dict[str, Any] = {
    "vocab_size": tiny_checkpoints.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": tiny_checkpoints.PAD,
    "bos_token_id": tiny_checkpoints.BOS,
    "eos_token_id": tiny_checkpoints.EOS,
    "tie_word_embeddings": False,
}
_EYE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_CLIP = {"model_type": "clip_vision_model", "projection_dim": 16, **_EYE}
_SIGLIP = {"model_type": "siglip_vision_model", **_EYE}
_SECTIONS = {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": _VIDEO,
    "vision_start_token_id": _START,
    "vision_end_token_id": _END,
}
_QWEN_EYE = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]

#: Each family's configuration, and that of its image processor.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": _CLIP, "image_token_index": IMAGE},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 16},
    ),
    "llava_next": (
        {
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": _CLIP,
            "image_token_index": IMAGE,
            "image_grid_pinpoints": _PINPOINTS,
        },
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": 16,
            "image_grid_pinpoints": _PINPOINTS,
        },
    ),
    "llava_onevision": (
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": _SIGLIP,
            "image_token_index": IMAGE,
            "video_token_index": _VIDEO,
            "image_grid_pinpoints": _PINPOINTS,
            "vision_feature_select_strategy": "full",
        },
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": _PINPOINTS,
        },
    ),
    "internvl": (
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {"model_type": "internvl_vision", **_EYE, "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 16, "width": 16},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
    ),
    "aya_vision": (
        {
            "text_config": {"model_type": "cohere2", **TEXT, "sliding_window": 16},
            "vision_config": _SIGLIP,
            "image_token_index": IMAGE,
            "downsample_factor": 2,
            "vision_feature_select_strategy": "full",
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 16, "width": 16},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
    ),
    "qwen2_vl": (
        {
            **_QWEN_IDS,
            "text_config": {**TEXT, "rope_parameters": _SECTIONS},
            "vision_config": {**_QWEN_EYE, "embed_dim": 16, "hidden_size": 32, "depth": 2, "mlp_ratio": 2},
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "min_pixels": 64, "max_pixels": 1024},
    ),
    "qwen2_5_vl": (
        {
            **_QWEN_IDS,
            "text_config": {**TEXT, "rope_parameters": _SECTIONS},
            "vision_config": {
                **_QWEN_EYE,
                "hidden_size": 16,
                "out_hidden_size": 32,
                "intermediate_size": 32,
                "depth": 2,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "min_pixels": 64, "max_pixels": 1024},
    ),
    "qwen3_vl": (
        {
            **_QWEN_IDS,
            "text_config": {**TEXT, "rope_parameters": _SECTIONS},
            "vision_config": {
                **_QWEN_EYE,
                "hidden_size": 16,
                "out_hidden_size": 32,
                "intermediate_size": 32,
                "depth": 2,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "min_pixels": 64, "max_pixels": 1024},
    ),
    "glm4v": (
        {
            **_QWEN_IDS,
            "image_start_token_id": _START,
            "image_end_token_id": _END,
            "text_config": {**TEXT, "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 1.0}},
            "vision_config": {
                "hidden_size": 16,
                "out_hidden_size": 32,
                "intermediate_size": 32,
                "depth": 2,
                "num_heads": 2,
                "patch_size": 4,
                "image_size": 16,
            },
        },
        {
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 4,
            "size": {"shortest_edge": 64, "longest_edge": 2048},
        },
    ),
    "mistral3": (
        {
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": {"model_type": "pixtral", **_EYE, "head_dim": 8},
            "image_token_index": IMAGE,
        },
        {"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": 32}},
    ),
    "gemma3": (
        {
            "text_config": {
                "model_type": "gemma3_text",
                **TEXT,
                "sliding_window": 6,
                "query_pre_attn_scalar": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {**_SIGLIP, "patch_size": 8},
            "image_token_index": IMAGE,
            "boi_token_index": _START,
            "eoi_token_index": _END,
            "mm_tokens_per_image": 4,
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
    ),
    "smolvlm": (
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {**_EYE, "image_size": 16},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        },
    ),
}
#: Sides of different lengths, since the library tells by these which way the matrices of a file lie.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES["qwen3_vl_moe"] = (
    {**FAMILIES["qwen3_vl"][0], "text_config": {**TEXT, "rope_parameters": _SECTIONS, **_EXPERTS}},
    FAMILIES["qwen3_vl"][1],
)
_HYBRID = {
    **TEXT,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**_SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0},
}
_PLAIN_EYE = {
    name: value for name, value in FAMILIES["qwen3_vl"][0]["vision_config"].items() if "deepstack" not in name
}
for _family, _more in (("qwen3_5", {}), ("qwen3_5_moe", {**_EXPERTS, "shared_expert_intermediate_size": 24})):
    FAMILIES[_family] = (
        {**_QWEN_IDS, "text_config": {**_HYBRID, **_more}, "vision_config": _PLAIN_EYE},
        FAMILIES["qwen3_vl"][1],
    )
FAMILIES["pixtral"] = (
    {
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", **_EYE, "head_dim": 8},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    FAMILIES["mistral3"][1],
)
FAMILIES["paligemma"] = (
    {
        "text_config": {"model_type": "gemma", **TEXT},
        "vision_config": {**_SIGLIP, "patch_size": 8, "vision_use_head": False},
        "image_token_index": IMAGE,
        "projection_dim": 32,
    },
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}, "image_seq_length": 4},
)
FAMILIES["paligemma2"] = (
    {
        **FAMILIES["paligemma"][0],
        "text_config": {**TEXT, "model_type": "gemma2", "sliding_window": 6, "query_pre_attn_scalar": 8},
    },
    FAMILIES["paligemma"][1],
)
FAMILIES["cohere2_vision"] = (
    {
        "text_config": {
            "model_type": "cohere2",
            **TEXT,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _SIGLIP,
        "image_token_id": IMAGE,
        "downsample_factor": 2,
        "alignment_intermediate_size": 32,
    },
    {
        "image_processor_type": "Cohere2VisionImageProcessor",
        "size": {"height": 16, "width": 16},
        "patch_size": 2,
        "max_patches": 4,
    },
)
FAMILIES["cohere_compass"] = (
    {
        **FAMILIES["qwen3_vl"][0],
        "text_config": {
            **TEXT,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": None, "sliding_attention": _SECTIONS},
        },
    },
    {**FAMILIES["qwen3_vl"][1], "image_processor_type": "CohereCompassImageProcessor"},
)
FAMILIES["deepseek_ocr2"] = (
    {
        "text_config": {
            **TEXT,
            "max_position_embeddings": 2048,  # a tile has 144 rows
            "mlp_layer_types": ["dense", "sparse"],
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        "vision_config": {
            "sam_config": {
                **_EYE,
                "image_size": 48,
                "patch_size": 1,
                "output_channels": 8,
                "window_size": 8,
                "global_attn_indexes": [1],
                "downsample_channels": [8, 16],
            },
            "encoder_config": {**TEXT, "hidden_size": 16, "num_attention_heads": 2},
        },
        "image_token_id": IMAGE,
    },
    {"image_processor_type": "DeepseekOcr2ImageProcessor", "size": {"height": 48, "width": 48}, "tile_size": 48},
)
FAMILIES["ernie4_5_vl_moe"] = (
    {
        **_QWEN_IDS,
        "image_start_token_id": _START,
        "image_end_token_id": _END,
        "text_config": {
            **TEXT,
            "rope_parameters": _SECTIONS,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": [24, 16],
        },
        "vision_config": {**_QWEN_EYE, "hidden_size": 16, "intermediate_size": 32, "depth": 2},
    },
    {
        "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
        "patch_size": 4,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
)
FAMILIES["kimi_k25"] = (
    {
        **_QWEN_IDS,
        "text_config": {
            **TEXT,
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
        "vision_config": {**_EYE, "pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 16,
    },
    {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "patch_size": 4,
        "max_patches": 64,
        "size": {"max_height": 512, "max_width": 512},
    },
)
FAMILIES["lfm2_vl"] = (
    {
        "text_config": {
            **TEXT,
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "full_attention", "full_attention"],
        },
        "vision_config": {**_EYE, "model_type": "siglip2_vision_model", "num_patches": 16},
        "image_token_id": IMAGE,
        "downsample_factor": 2,
        "projector_hidden_size": 24,
    },
    {
        "image_processor_type": "Lfm2VlImageProcessor",
        "encoder_patch_size": 4,
        "tile_size": 16,
        "min_image_tokens": 1,
        "max_image_tokens": 4,
        "max_tiles": 4,
        "max_pixels_tolerance": 1.0,
    },
)
FAMILIES["ovis2"] = (
    {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**_EYE, "hidden_stride": 2, "vocab_size": 40},
        "image_token_id": IMAGE,
        "visual_indicator_token_ids": [IMAGE - number for number in range(1, 6)],
        "hidden_size": TEXT["hidden_size"],
        "vocab_size": TEXT["vocab_size"],
    },
    {
        "image_processor_type": "Ovis2ImageProcessor",
        "size": {"height": 16, "width": 16},
        "crop_to_patches": True,
        "max_patches": 4,
    },
)
FAMILIES["paddleocr_vl"] = (
    {
        **_QWEN_IDS,
        "text_config": {**TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {**_EYE, "spatial_merge_size": 2},
    },
    {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
)
FAMILIES["glm46v"] = (FAMILIES["glm4v"][0], {**FAMILIES["glm4v"][1], "image_processor_type": "Glm46VImageProcessor"})
FAMILIES["glm_ocr"] = FAMILIES["glm46v"]
FAMILIES["glm4v_moe"] = (
    {
        **FAMILIES["glm4v"][0],
        "text_config": {
            **FAMILIES["glm4v"][0]["text_config"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    },
    FAMILIES["glm4v"][1],
)
for _family, _text, _eye in (
    ("exaone4_5", {"model_type": "exaone4"}, {"num_key_value_heads": 1}),
    ("hyperclovax_vision_v2", {"model_type": "hyperclovax"}, {"model_type": "qwen2_5_vl_vision"}),
):
    _fields, _processor = FAMILIES["qwen2_5_vl"]
    FAMILIES[_family] = (
        {
            "image_token_id": IMAGE,
            "video_token_id": _VIDEO,
            "text_config": {**TEXT, **_text},
            "vision_config": {**_fields["vision_config"], **_eye},
        },
        _processor,
    )
FAMILIES["lfm3_vl"] = (
    {
        **_QWEN_IDS,
        "text_config": {
            **TEXT,
            "model_type": "lfm3",
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "full_attention", "full_attention"],
        },
        "vision_config": {
            **_EYE,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "conv"],
            "spatial_merge_size": 2,
        },
        "projector_hidden_size": 24,
    },
    FAMILIES["qwen2_vl"][1],
)
FAMILIES["lighton_ocr"] = (
    {
        "text_config": {"model_type": "qwen3", **TEXT},
        "vision_config": {"model_type": "pixtral", **_EYE, "head_dim": 8},
        "image_token_id": IMAGE,
    },
    FAMILIES["mistral3"][1],
)
for _family, _sees, _per_layer in (("gemma4", None, 16), ("gemma4_mutual", "vision", 0)):
    FAMILIES[_family] = (
        {
            "image_token_id": IMAGE,
            "boi_token_id": _START,
            "eoi_token_id": _END,
            "video_token_id": _VIDEO,
            "audio_token_id": _VIDEO - 1,
            "text_config": {
                **TEXT,
                "model_type": "gemma4_text",
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 40,  # an image has 70 rows
                "global_head_dim": 16,
                "hidden_size_per_layer_input": _per_layer,
                "vocab_size_per_layer_input": TEXT["vocab_size"],
                "num_kv_shared_layers": 2 if _per_layer else 0,
                "use_bidirectional_attention": _sees,
            },
            "vision_config": {
                **_EYE,
                "model_type": "gemma4_vision",
                "num_key_value_heads": 2,
                "head_dim": 8,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "audio_config": {
                "model_type": "gemma4_audio",
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [4, 4],
                "output_proj_dims": 16,
            },
        },
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
    )
FAMILIES["idefics3"] = (
    FAMILIES["smolvlm"][0],
    {**FAMILIES["smolvlm"][1], "image_processor_type": "Idefics3ImageProcessor"},
)


@made_once
def make_seeing(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> None:
    """Write a checkpoint of `family` into `folder`. `overrides` replace fields of its text configuration."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils import logging

    fields, processor = FAMILIES[family]
    fields = {**fields, "text_config": {**fields["text_config"], **overrides}, "tie_word_embeddings": False}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(MODEL_TYPES.get(family, family), **fields))
    tiny_checkpoints.randomize(model, seed)
    if family == "gemma3":  # its embedding of text is scaled up
        model.model.multi_modal_projector.mm_input_projection_weight.data *= 6
    elif MODEL_TYPES.get(family, family) == "paligemma":
        model.model.multi_modal_projector.linear.weight.data *= 6
    elif family == "lfm2_vl":  # pictures of noise look alike
        model.model.vision_tower.embeddings.patch_embedding.weight.data *= 6
        model.model.multi_modal_projector.linear_2.weight.data *= 6
    elif family == "smolvlm":  # there is much text between the frames of a video
        model.model.connector.modality_projection.proj.weight.data *= 6
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    tiny_checkpoints.save_tokenizer(folder)
    name_tokens(folder, names_of(family))


def names_of(family: str) -> tuple[str, ...]:
    return NAMES.get(family, ("<image>",))


def placeholder_of(family: str) -> str:
    """Return the placeholder of an image in a prompt. In most families, it is also the token of the image's rows."""
    name = names_of(family)[0]
    return _PLACEHOLDERS.get(name, name)


def name_tokens(folder: Path, names: tuple[str, ...], modality: str = "image") -> None:
    """Add `names` as the last tokens of the vocabulary, the placeholder at the very end. The chat template accepts
    parts of the given `modality`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    num_free = tiny_checkpoints.VOCAB_SIZE - len(tokenizer) - len(names)
    tokenizer.add_tokens([f"<|free_{number}|>" for number in range(num_free)], special_tokens=True)
    tokenizer.add_tokens(list(reversed(names)), special_tokens=True)
    template = CHAT_TEMPLATE.replace("'image'", repr(modality))
    if "<|video_pad|>" in names:
        template = template.replace("{% else %}{{ part['text'] }}", f"{_VIDEO_PART}{{% else %}}{{{{ part['text'] }}}}")
    tokenizer.chat_template = template.replace("IMAGE", (_PLACEHOLDERS | _WRITTEN).get(names[0], names[0]))
    tokenizer.save_pretrained(folder)
