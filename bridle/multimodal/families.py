"""The layout of an image's placeholder in a prompt, for each model family. A layout consists of runs of rows, and of
marker tokens between the runs. A row is a position of the prompt that takes one feature row from the vision tower. The
processors of transformers follow the same rules, but need torch, torchvision or their own prompt texts. Tests compare
every rule with transformers. For each image, the number of rows is compared with the number of the tower's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PlaceholderLayout:
    """The expansion of an image's placeholder. `parts` are numbers of rows and texts of marker tokens, in order. For
    models with positions in time, height and width, `grid` is the size of each run of rows in these dimensions.
    Consecutive times in a grid are `pace` positions apart. `around` are marker tokens that templates write around the
    placeholder. The tokens in `around` are removed, because `parts` have their own marker tokens. `tokens` are the
    tokens at the rows, given only if some rows are marker tokens."""

    parts: tuple[int | str, ...]
    grid: tuple[int, int, int] | None = None
    around: tuple[str, str] = ("", "")
    pace: float = 1.0
    tokens: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(part for part in self.parts if isinstance(part, int))


@dataclass(frozen=True, slots=True)
class MultiModalFamily:
    """A family of multimodal models. `arrays` names the results of the image processor that the tower reads, and
    `options` are passed to the processor. The configuration field named `placeholder` has the token of an image in a
    prompt. If `is_mutual` is true, or the configuration's value of bidirectional attention, the rows of an image attend
    to each other in both directions. With `is_whole`, all tokens of a prompt with images attend to each other.
    Templates may write the text `written`, which is not a token, for an image."""

    lay_out: Callable[[Config, Arrays], PlaceholderLayout]
    arrays: tuple[str, ...] = ("pixel_values",)
    options: Mapping[str, Any] | None = None
    placeholder: str = "image_token_id"
    is_mutual: bool | str = False
    is_whole: bool = False
    written: str = ""


# -- LLaVA -----------------------------------------------------------------------------------------------------


def _llava(config: Config, arrays: Arrays) -> PlaceholderLayout:
    vision = config["vision_config"]
    height, width = arrays["pixel_values"].shape[-2:]
    return PlaceholderLayout((_num_patches(config, height // vision["patch_size"], width // vision["patch_size"]),))


def _num_patches(config: Config, rows: int, columns: int) -> int:
    """Return the number of prompt rows for an image of `rows` x `columns` patches. CLIP puts one row for the whole
    image before the patches, and the strategy `default` drops the first row."""
    has_whole = config["vision_config"].get("model_type", "clip_vision_model") == "clip_vision_model"
    return rows * columns + int(has_whole) - int(config.get("vision_feature_select_strategy", "default") == "default")


def _llava_next(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out the whole image, then its tiles as one grid without padding. Each line of the grid has an end token."""
    whole = _num_patches(config, _side(config), _side(config))
    if arrays["pixel_values"].shape[1] == 1:
        return PlaceholderLayout((whole + 1,))
    rows, columns = _unpadded(config, arrays)
    return PlaceholderLayout((whole + rows * (columns + 1),))


def _llava_onevision(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out an image like `_llava_next`, but scale the grid of tiles down if it has many patches."""
    side = _side(config)
    if arrays["pixel_values"].shape[1] == 1:
        return PlaceholderLayout((side * side + 1,))
    rows, columns = _unpadded(config, arrays)
    most = int(str(config.get("vision_aspect_ratio", "anyres_max_9")).rpartition("_")[2])
    ratio = math.sqrt(rows * columns / (most * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return PlaceholderLayout((side * side + rows * (columns + 1),))


def _side(config: Config) -> int:
    """Return the number of patches along one side of a tile."""
    vision = config["vision_config"]
    return int(vision["image_size"]) // int(vision["patch_size"])


def _unpadded(config: Config, arrays: Arrays) -> tuple[int, int]:
    """Return the number of lines and columns in the grid of patches of all tiles, without padding."""
    side, size = _side(config), int(config["vision_config"]["image_size"])
    height, width = map(int, arrays["image_sizes"][0])
    best = _best_resolution(height, width, config["image_grid_pinpoints"])
    rows, columns = best[0] // size * side, best[1] // size * side
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        return rows - 2 * ((rows - kept) // 2), columns
    kept = int(round(width * (rows / height), 7))
    return rows, columns - 2 * ((columns - kept) // 2)


def _best_resolution(height: int, width: int, choices: list[list[int]]) -> tuple[int, int]:
    """Return the size in `choices` that keeps most of the image's resolution; among equal sizes, the one with the least
    padding."""

    def merit(choice: list[int]) -> tuple[int, int]:
        scale = min(choice[1] / width, choice[0] / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - choice[0] * choice[1]

    chosen = max(choices, key=merit)  # the first of equal choices
    return int(chosen[0]), int(chosen[1])


# -- tiles, rows and grids ---------------------------------------------------------------------------------------


def internvl_rows(config: Config) -> int:
    """Return the number of rows of a tile."""
    vision = config["vision_config"]
    (size, _), (patch, _) = pair(vision["image_size"]), pair(vision["patch_size"])
    return int((size // patch) ** 2 * config.get("downsample_ratio", 0.5) ** 2)


def _internvl(config: Config, arrays: Arrays) -> PlaceholderLayout:
    return PlaceholderLayout(("<img>", internvl_rows(config) * arrays["pixel_values"].shape[0], "</img>"))


def _aya(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out tiles, each after its number, then the whole image. A small image has no tiles."""
    rows = (_side(config) // int(config.get("downsample_factor", 2))) ** 2
    parts: list[int | str] = ["<|START_OF_IMG|>"]
    for number in range(1, arrays["pixel_values"].shape[0]):
        parts += [f"TILE_{number}", rows]
    return PlaceholderLayout(tuple(_joined([*parts, "TILE_GLOBAL", rows, "<|END_OF_IMG|>"])))


def pair(value: Any) -> tuple[int, int]:
    first, second = value if isinstance(value, (list, tuple)) else (value, value)
    return int(first), int(second)


def idefics_rows(config: Config) -> int:
    """Return the number of rows of a tile."""
    vision = config["vision_config"]
    return int((vision["image_size"] // vision["patch_size"]) ** 2 / config.get("scale_factor", 2) ** 2)


def _idefics(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out tiles line by line, then the whole image, each between marker tokens. A small image has no tiles."""
    rows = idefics_rows(config)
    tiles = (int(np.ravel(arrays[name])[0]) for name in ("rows", "cols"))
    num_rows, num_columns = tiles
    around = "<fake_token_around_image>"
    parts: list[int | str] = []
    for row in range(1, num_rows + 1):
        for column in range(1, num_columns + 1):
            parts += [f"{around}<row_{row}_col_{column}>", rows]
        parts.append("\n")
    parts += ["\n" if parts else "", f"{around}<global-img>", rows, around]
    return PlaceholderLayout(tuple(_joined(parts)))


def _joined(parts: list[int | str]) -> list[int | str]:
    """Join adjacent texts, because a token may span two of them."""
    joined: list[int | str] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return joined


def _pixtral(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out one run for each line of patches, with a marker token between lines and another one at the end."""
    size = int(config["vision_config"]["patch_size"]) * int(config.get("spatial_merge_size", 1))
    height, width = map(int, arrays["image_sizes"][0])
    rows, columns = height // size, width // size
    parts: list[int | str] = []
    for row in range(rows):
        parts += [columns, "[IMG_BREAK]" if row + 1 < rows else "[IMG_END]"]
    return PlaceholderLayout(tuple(parts))


def _llava_or_pixtral(config: Config, arrays: Arrays) -> PlaceholderLayout:
    is_pixtral = config["vision_config"].get("model_type") == "pixtral"
    return _pixtral(config, arrays) if is_pixtral else _llava(config, arrays)


def _qwen(config: Config, arrays: Arrays) -> PlaceholderLayout:
    merge = int(config["vision_config"].get("spatial_merge_size", 2))
    time, height, width = map(int, arrays["image_grid_thw"][0])
    grid = time, height // merge, width // merge
    return PlaceholderLayout((math.prod(grid),), grid)


def _gemma3(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out the image and the crops of it that the processor makes, each between marker tokens."""
    whole: list[int | str] = ["\n\n<start_of_image>", int(config["mm_tokens_per_image"]), "<end_of_image>\n\n"]
    num_crops = arrays["pixel_values"].shape[0] - 1
    if not num_crops:
        return PlaceholderLayout(tuple(whole))
    parts = ["Here is the original image ", *whole, " and here are some crops to help you see better ", *whole]
    for _ in range(num_crops - 1):
        parts += [" ", *whole]
    return PlaceholderLayout(tuple(_joined(parts)))


def _paligemma(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out one row per patch. In transformers, positions are counted from 1 instead of 0. The offset of 1 makes no
    difference, because rotary positions are relative."""
    return PlaceholderLayout((_side(config) ** 2,))


def _ungridded(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out an image as for Qwen, but with ordinary text positions."""
    vision = config["vision_config"]
    merge = math.prod(pair(vision.get("merge_kernel_size") or vision["spatial_merge_size"]))
    return PlaceholderLayout((int(np.prod(arrays["image_grid_thw"][0])) // merge,))


def _lighton(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out an image as for Pixtral, but without marker tokens between the lines of patches."""
    return PlaceholderLayout((_pixtral(config, arrays).num_rows,))


def _ovis(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out the whole image, then its tiles line by line. The tower also computes features for the marker tokens
    between these tiles."""
    start, grid, column, row, end = config["visual_indicator_token_ids"]
    height, width = map(int, arrays["grids"][0])
    vision = config["vision_config"]
    tile = [config["image_token_id"]] * math.ceil(_side(config) / int(vision["hidden_stride"])) ** 2
    line = [row, *([*tile, column] * width)[:-1]]
    tiles = (line * height)[1:] if height * width > 1 else []
    tokens = (start, *tile, grid, *tiles, end)
    return PlaceholderLayout((len(tokens),), tokens=tokens)


def _deepseek_ocr(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out tiles, then the whole image, then one row that marks the end of the image."""
    patch = int(config["vision_config"]["sam_config"]["patch_size"]) * _OCR_SCALE
    rows = [math.ceil(arrays["pixel_values"].shape[-1] / patch) ** 2 + 1]
    if (num_tiles := int(arrays["num_local_patches"][0])) > 0:
        rows.append(num_tiles * math.ceil(arrays["pixel_values_local"].shape[-1] / patch) ** 2)
    return PlaceholderLayout((sum(rows),))


def _cohere2(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out tiles, then the whole image, each with an end token."""
    rows = (_side(config) // int(config["downsample_factor"])) ** 2
    tiles = (rows, "<|IMG_LINE_BREAK|>") * arrays["pixel_values"].shape[0]
    return PlaceholderLayout(("<|START_OF_IMG|>", *tiles[:-1], "<|IMG_LINE_BREAK|><|END_OF_IMG|>"))


def _lfm2(config: Config, arrays: Arrays) -> PlaceholderLayout:
    """Lay out tiles, each after its number, then the whole image. A small image has no tiles."""
    factor = int(config["downsample_factor"])
    rows = [math.ceil(height / factor) * math.ceil(width / factor) for height, width in arrays["spatial_shapes"]]
    num_rows, num_columns = (int(np.ravel(arrays[name])[0]) for name in ("image_rows", "image_cols"))
    parts: list[int | str] = ["<|image_start|>"]
    num_tiles = num_rows * num_columns if num_rows * num_columns > 1 else 0
    for number in range(num_tiles):
        row, column = divmod(number, num_columns)
        parts += [f"<|img_row_{row + 1}_col_{column + 1}|>", rows[number]]
    if len(rows) > num_tiles:
        parts += ["<|img_thumbnail|>" if num_tiles else "", rows[-1]]
    return PlaceholderLayout(tuple(_joined([*parts, "<|image_end|>"])))


#: Side of the square of patches that DeepSeek-OCR 2 converts to one row.
_OCR_SCALE = 4


def _gemma4(config: Config, arrays: Arrays) -> PlaceholderLayout:
    return PlaceholderLayout(("<|image>", int(arrays["num_soft_tokens_per_image"][0]), "<image|>"))


_SIZED = ("pixel_values", "image_sizes")
_UNGRIDDED = MultiModalFamily(_ungridded, ("pixel_values", "image_grid_thw"))
_GRIDDED = MultiModalFamily(_qwen, ("pixel_values", "image_grid_thw"))
_TILED = MultiModalFamily(_idefics, ("pixel_values", "pixel_attention_mask"), {"return_row_col_info": True})

#: Supported families of image models.
FAMILIES: Mapping[str, MultiModalFamily] = {
    "aya_vision": MultiModalFamily(_aya, written="<image>"),
    "cohere2_vision": MultiModalFamily(_cohere2),
    "cohere_compass": _GRIDDED,
    "deepseek_ocr2": MultiModalFamily(
        _deepseek_ocr,
        ("pixel_values", "pixel_values_local", "num_local_patches"),
        {"crop_to_patches": True, "min_patches": 2, "max_patches": 6},
    ),
    "ernie4_5_vl_moe": _GRIDDED,
    "exaone4_5": _UNGRIDDED,
    "gemma3": MultiModalFamily(_gemma3, placeholder="boi_token_index", is_mutual=True),
    "gemma4": MultiModalFamily(_gemma4, ("pixel_values", "image_position_ids"), is_mutual="vision"),
    "glm46v": _GRIDDED,
    "glm4v": _GRIDDED,
    "glm4v_moe": _GRIDDED,
    "glm_ocr": _GRIDDED,
    "hyperclovax_vision_v2": _UNGRIDDED,
    "idefics3": _TILED,
    "internvl": MultiModalFamily(_internvl),
    "kimi_k25": _UNGRIDDED,
    "lfm2_vl": MultiModalFamily(
        _lfm2, ("pixel_values", "spatial_shapes", "pixel_attention_mask"), {"return_row_col_info": True}
    ),
    "lfm3_vl": _UNGRIDDED,
    "lighton_ocr": MultiModalFamily(_lighton, _SIZED),
    "llava": MultiModalFamily(_llava_or_pixtral, _SIZED),
    "llava_next": MultiModalFamily(_llava_next, _SIZED),
    "llava_onevision": MultiModalFamily(_llava_onevision, _SIZED),
    "mistral3": MultiModalFamily(_pixtral, _SIZED),
    "ovis2": MultiModalFamily(_ovis, written="<image>"),
    "paddleocr_vl": _GRIDDED,
    "paligemma": MultiModalFamily(_paligemma, is_whole=True),
    "qwen2_5_vl": _GRIDDED,
    "qwen2_vl": _GRIDDED,
    "qwen3_5": _GRIDDED,
    "qwen3_5_moe": _GRIDDED,
    "qwen3_vl": _GRIDDED,
    "qwen3_vl_moe": _GRIDDED,
    "smolvlm": _TILED,
}
