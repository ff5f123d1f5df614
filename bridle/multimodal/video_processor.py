"""Reads videos. Each model family has rules for the choice of frames, their size, and the tokens in the prompt. The
video processors of transformers follow the same rules, but need torchvision. The tests compare every rule of this
module with transformers. This module also limits the total pixels of all frames, by `MediaLimits`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridle.errors import MediaRefused
from bridle.multimodal.families import Arrays, Config, PlaceholderLayout
from bridle.multimodal.frames_as_images import AS_PICTURES, behind_frames, by_seconds
from bridle.multimodal.limits import MOST_RATIO, MediaLimits
from bridle.multimodal.modalities import VIDEO
from bridle.multimodal.processor import added_token, read_settings, token_of
from bridle.multimodal.video_decoding import Clip, check_clip, open_clip
from bridle.multimodal.video_frames import Frames, FrameSampling, Grid, SelectedFrames, Shown, normalized, patches_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FILES = (
    ("video_preprocessor_config.json", ""),
    ("processor_config.json", "video_processor"),
    ("preprocessor_config.json", ""),
)
#: Maximum rows of a frame in Qwen's own tools.
_FRAME_ROWS = 768


# -- Qwen ---------------------------------------------------------------------------------------------------------


def _evenly(clip: Clip, frames: Frames, many: int) -> list[int]:
    """Return the indices of frames at equal distances. The number of frames is a multiple of the temporal patch
    size."""
    most = min(frames.many, many, clip.count) // frames.temporal * frames.temporal
    wanted = min(max(clip.count / clip.rate * frames.rate, frames.fewest), most, clip.count)
    num = max(int(wanted // frames.temporal) * frames.temporal, 1)
    return [int(number * (clip.count / num)) for number in range(num)]


def _from_end_to_end(clip: Clip, frames: Frames, many: int) -> list[int]:
    """Return the indices of the first frame, the last frame, and frames at equal distances between them."""
    wanted = int(clip.count / clip.rate * frames.rate)
    num = min(max(wanted, frames.fewest), frames.many, many, clip.count)
    return [int(index) for index in np.linspace(0, clip.count - 1, num).round()]


def _size_of_each(config: Config, clip: Clip, num: int, frames: Frames, budget: int) -> tuple[int, int]:
    """Return a frame size within the limits of a single frame, such that all frames together have at most `budget`
    pixels."""
    most = min(frames.most, _FRAME_ROWS * frames.side**2, budget // num)
    return fitted(clip.height, clip.width, frames.side, min(frames.least, most), most)


def _size_of_all(config: Config, clip: Clip, num: int, frames: Frames, budget: int) -> tuple[int, int]:
    """Return a frame size such that all frames together have between `least` and `most` pixels."""
    height, width, side = clip.height, clip.width, frames.side
    if min(height, width) < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    most = min(frames.most, budget)
    rounded = max(round(num / frames.temporal), 1) * frames.temporal
    return fitted(height, width, side, min(frames.least, most), most, num, rounded)


def fitted(
    height: int, width: int, side: int, least: int, most: int, num: int = 1, rounded: int = 1
) -> tuple[int, int]:
    """Return a height and a width that are multiples of `side`, near the given height and width. `rounded` frames of
    the returned size have between `least` and `most` pixels together. If the limits require scaling, the scale is
    computed for `num` frames of the given size."""
    tall, wide = round(height / side) * side, round(width / side) * side
    if rounded * tall * wide > most:
        ratio = math.sqrt(num * height * width / most)
        tall = max(side, math.floor(height / ratio / side) * side)
        wide = max(side, math.floor(width / ratio / side) * side)
    elif rounded * tall * wide < least:
        ratio = math.sqrt(least / (num * height * width))
        tall, wide = math.ceil(height * ratio / side) * side, math.ceil(width * ratio / side) * side
    return tall, wide


def _in_one_run(config: Config, seen: SelectedFrames) -> PlaceholderLayout:
    """Lay out all frames in one run. The distance between the frames' time positions is computed from the
    configuration, or is 1."""
    tokens = config["vision_config"].get("tokens_per_second") if config["model_type"] == "qwen2_5_vl" else None
    pace = 1.0 if tokens is None else tokens * seen.seconds
    return PlaceholderLayout((math.prod(seen.grid),), seen.grid, pace=pace)


def _with_times(config: Config, seen: SelectedFrames) -> PlaceholderLayout:
    """Lay out one run for each time of the grid, after a text with the time in seconds."""
    _, height, width = seen.grid
    parts: list[int | str] = []
    for time in seen.times:
        start = f"<{time:.1f} seconds><|vision_start|>"
        if parts:
            start = str(parts.pop()) + start
        parts += [start, height * width, "<|vision_end|>"]
    return PlaceholderLayout(tuple(parts), (1, height, width), around=("<|vision_start|>", "<|vision_end|>"))


def _patches(shown: Shown, frames: Frames) -> tuple[Arrays, Grid]:
    patches, (times, height, width) = patches_of(shown, frames)
    rows = times, height // frames.merge, width // frames.merge
    return {"pixel_values_videos": patches, "video_grid_thw": np.array([(times, height, width)], np.int64)}, rows


_QWEN2 = FrameSampling(_evenly, _size_of_each, _patches, _in_one_run)
_QWEN3 = FrameSampling(
    _from_end_to_end,
    _size_of_all,
    _patches,
    _with_times,
    Frames(16, least=128 * 32 * 32, most=768 * 32 * 32, mean=(0.5, 0.5, 0.5), deviation=(0.5, 0.5, 0.5)),
)

# -- GLM-4V -------------------------------------------------------------------------------------------------------


def _size_of_pairs(config: Config, clip: Clip, num: int, frames: Frames, budget: int) -> tuple[int, int]:
    """Return a frame size as `_size_of_all` does. If the number of frames is odd and the caller did not select the
    frames, the last frame counts twice."""
    return _size_of_all(config, clip, num if clip.is_chosen else num + -num % frames.temporal, frames, budget)


_GLM = FrameSampling(
    by_seconds,
    _size_of_pairs,
    _patches,
    behind_frames,
    Frames(least=112 * 112, most=28 * 28 * 2 * 30_000),
    rows_in="image_token_id",
)

# -- LLaVA-OneVision ------------------------------------------------------------------------------------------------


def _tile(config: Config, clip: Clip, num: int, frames: Frames, budget: int) -> tuple[int, int]:
    """Return the fixed image size of the tower."""
    side = int(config["vision_config"]["image_size"])
    return side, side


def _pixels(shown: Shown, frames: Frames) -> tuple[Arrays, Grid]:
    pixels = normalized(np.stack(shown), frames).transpose(0, 3, 1, 2)
    return {"pixel_values_videos": pixels[None]}, (len(shown), 1, 1)


def _pooled(config: Config, seen: SelectedFrames) -> PlaceholderLayout:
    """Lay out each frame with half of its patches in each dimension, because the model pools patches. One more row
    follows after the last frame."""
    vision = config["vision_config"]
    side = math.ceil(int(vision["image_size"]) // int(vision["patch_size"]) / 2)
    return PlaceholderLayout((seen.grid[0] * side * side + 1,))


_ONEVISION = FrameSampling(_from_end_to_end, _tile, _pixels, _pooled, Frames(temporal=1, fewest=32, many=32))

#: Supported families of video models.
WATCHING: Mapping[str, FrameSampling] = {
    **AS_PICTURES,
    "glm4v": _GLM,
    "llava_onevision": _ONEVISION,
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}


# -- what a tower reads --------------------------------------------------------------------------------------------


class VideoProcessor:
    """Implements `bridle.multimodal.processor.ModalityProcessor` for videos."""

    modality, is_mutual, is_whole = VIDEO, False, False

    def __init__(self, folder: Path, settings: PreTrainedConfig, family: FrameSampling) -> None:
        self._folder, self._config, self._family = folder, settings.to_dict(), family
        self._frames: Frames | None = None
        named = added_token(folder, family.places, VIDEO) if family.places else None
        self.placeholder = token_of(settings, "video_token_id", VIDEO) if named is None else named
        self.row_token = token_of(settings, family.rows_in, VIDEO)
        self.written = family.written

    def read(self, file: Any, limits: MediaLimits, where: str) -> tuple[Arrays, PlaceholderLayout]:
        """Read a video: the bytes of a file, or a list or array of frames, optionally with a rate."""
        if self._frames is None:
            settings = self._family.settings(read_settings(self._folder, _FILES, VIDEO))
            self._frames = Frames.of(settings, self._family.base)
        frames, family = self._frames, self._family
        clip = open_clip(file, limits, where) if isinstance(file, bytes) else check_clip(file, limits, where)
        if max(clip.width, clip.height) > MOST_RATIO * min(clip.width, clip.height):
            raise MediaRefused(f"{where} has frames with a side {MOST_RATIO} times as long as the other", where)
        chosen = range(clip.count) if clip.is_chosen else family.sample(clip, frames, self._most(clip, frames, limits))
        budget = min(limits.max_video_pixels, limits.max_video_rows * frames.temporal * frames.side**2)
        height, width = family.size(self._config, clip, len(chosen), frames, budget)
        if (pixels := len(chosen) * height * width) > (most := 2 * limits.max_video_pixels):
            raise MediaRefused(f"{where} has {pixels} pixels after resizing for this model; at most {most}", where)
        shown = [family.draw(frame, clip, frames, height, width) for frame in clip.unpack(chosen)]
        arrays, grid = family.make(shown, frames)
        return arrays, family.lay_out(
            self._config, SelectedFrames(tuple(chosen), clip.count, clip.rate, frames.temporal, grid)
        )

    def _most(self, clip: Clip, frames: Frames, limits: MediaLimits) -> int:
        """Return the maximum number of frames within the limits. Frames of a fixed size cannot be scaled down, so fewer
        frames are used."""
        if self._family.rows is None:
            return limits.max_frames
        height, width = self._family.size(self._config, clip, 1, frames, limits.max_video_pixels)
        by_pixels = 2 * limits.max_video_pixels // (height * width)
        by_rows = limits.max_video_rows // max(self._family.rows(self._config), 1)
        return max(min(limits.max_frames, by_pixels, by_rows), 1)
