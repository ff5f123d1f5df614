"""Reads videos: which frames are seen, at what size, and what stands in a prompt for them, family by family.

The library's own video processors do the same, but need torchvision. Every rule here is compared with theirs in the
tests. What they leave without a bound has one here: all frames together have no more pixels than `MediaLimits` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bridle.errors import MediaRefused
from bridle.media.clips import Clip, check_clip, open_clip
from bridle.media.families import Arrays, Config, Layout
from bridle.media.limits import MOST_RATIO, MediaLimits
from bridle.media.modalities import VIDEO
from bridle.media.senses import read_settings, token_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Shown = Sequence[NDArray[np.uint8]]
Grid = tuple[int, int, int]

_FILES = (
    ("video_preprocessor_config.json", ""),
    ("processor_config.json", "video_processor"),
    ("preprocessor_config.json", ""),
)
#: Rows of a frame that Qwen's own tools show at most.
_FRAME_ROWS = 768


@dataclass(frozen=True, slots=True)
class Frames:
    """How a checkpoint's frames are made: patches of `patch` x `patch` pixels over `temporal` frames, `merge` x `merge`
    of which are a row; between `least` and `most` pixels; `rate` frames of a second, `fewest` to `many` in all."""

    patch: int = 14
    temporal: int = 2
    merge: int = 2
    least: int = 128 * 28 * 28
    most: int = 768 * 28 * 28
    rate: float = 2.0
    fewest: int = 4
    many: int = 768
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    deviation: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def of(cls, settings: Mapping[str, Any], base: Frames) -> Frames:
        """As a checkpoint says; what it leaves out is as in `base`."""
        size = settings.get("size") or {}
        return cls(
            int(settings.get("patch_size", base.patch)),
            int(settings.get("temporal_patch_size", base.temporal)),
            int(settings.get("merge_size", base.merge)),
            int(settings.get("min_pixels") or size.get("shortest_edge") or base.least),
            int(settings.get("max_pixels") or size.get("longest_edge") or base.most),
            float(settings.get("fps") or base.rate),
            int(settings.get("min_frames") or base.fewest),
            int(settings.get("max_frames") or base.many),
            tuple(settings.get("image_mean") or base.mean),
            tuple(settings.get("image_std") or base.deviation),
        )

    @property
    def side(self) -> int:
        """Pixels along a side of a row."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class Seen:
    """What is seen of a clip: frames at `indices`, of `rate` in a second, as `grid` rows by time, height and width."""

    indices: tuple[int, ...]
    count: int
    rate: float
    temporal: int
    grid: Grid

    @property
    def seconds(self) -> float:
        """Between two times of the grid."""
        return self.temporal / (len(self.indices) / self.count * self.rate)

    @property
    def times(self) -> list[float]:
        """Of each time of the grid the middle, in seconds."""
        padded = [*self.indices, *[self.indices[-1]] * (-len(self.indices) % self.temporal)]
        ends = zip(padded[:: self.temporal], padded[self.temporal - 1 :: self.temporal], strict=True)
        return [(first / self.rate + last / self.rate) / 2 for first, last in ends]


@dataclass(frozen=True, slots=True)
class Watching:
    """How a family reads videos: `sample` chooses frames, `size` says how large they are shown (height, width), `make`
    what the tower is given, with a grid of it by time, height and width, and `lay_out` what stands in a prompt. `base`
    is what its processor has where a checkpoint says nothing."""

    sample: Callable[[Clip, Frames, int], Sequence[int]]
    size: Callable[[Config, Clip, int, Frames, int], tuple[int, int]]
    make: Callable[[Shown, Frames], tuple[Arrays, Grid]]
    lay_out: Callable[[Config, Seen], Layout]
    base: Frames = Frames()


# -- Qwen ---------------------------------------------------------------------------------------------------------


def _evenly(clip: Clip, frames: Frames, many: int) -> list[int]:
    """Frames a like distance apart, in whole patches of time."""
    most = min(frames.many, many, clip.count) // frames.temporal * frames.temporal
    wanted = min(max(clip.count / clip.rate * frames.rate, frames.fewest), most, clip.count)
    num = max(int(wanted // frames.temporal) * frames.temporal, 1)
    return [int(number * (clip.count / num)) for number in range(num)]


def _from_end_to_end(clip: Clip, frames: Frames, many: int) -> list[int]:
    """The first frame, the last, and some between them."""
    wanted = int(clip.count / clip.rate * frames.rate)
    num = min(max(wanted, frames.fewest), frames.many, many, clip.count)
    return [int(index) for index in np.linspace(0, clip.count - 1, num).round()]


def _size_of_each(config: Config, clip: Clip, num: int, frames: Frames, budget: int) -> tuple[int, int]:
    """Each frame between the least and the most, and all together within the budget."""
    most = min(frames.most, _FRAME_ROWS * frames.side**2, budget // num)
    return fitted(clip.height, clip.width, frames.side, min(frames.least, most), most)


def _size_of_all(config: Config, clip: Clip, num: int, frames: Frames, budget: int) -> tuple[int, int]:
    """All frames together between the least and the most."""
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
    """Multiples of `side` near a height and a width, so that `num` frames, or `rounded` of them once they have that
    size, have between `least` and `most` pixels."""
    tall, wide = round(height / side) * side, round(width / side) * side
    if rounded * tall * wide > most:
        ratio = math.sqrt(num * height * width / most)
        tall = max(side, math.floor(height / ratio / side) * side)
        wide = max(side, math.floor(width / ratio / side) * side)
    elif rounded * tall * wide < least:
        ratio = math.sqrt(least / (num * height * width))
        tall, wide = math.ceil(height * ratio / side) * side, math.ceil(width * ratio / side) * side
    return tall, wide


def _in_one_run(config: Config, seen: Seen) -> Layout:
    """All frames in one run; how far apart their times lie, the configuration says, or they are counted."""
    tokens = config["vision_config"].get("tokens_per_second") if config["model_type"] == "qwen2_5_vl" else None
    pace = 1.0 if tokens is None else tokens * seen.seconds
    return Layout((math.prod(seen.grid),), seen.grid, pace=pace)


def _with_times(config: Config, seen: Seen) -> Layout:
    """A run for each time, with the time in words before it."""
    _, height, width = seen.grid
    parts: list[int | str] = []
    for time in seen.times:
        start = f"<{time:.1f} seconds><|vision_start|>"
        if parts:
            start = str(parts.pop()) + start
        parts += [start, height * width, "<|vision_end|>"]
    return Layout(tuple(parts), (1, height, width), around=("<|vision_start|>", "<|vision_end|>"))


def _patches(shown: Shown, frames: Frames) -> tuple[Arrays, Grid]:
    patches, (times, height, width) = patches_of(shown, frames)
    rows = times, height // frames.merge, width // frames.merge
    return {"pixel_values_videos": patches, "video_grid_thw": np.array([(times, height, width)], np.int64)}, rows


_QWEN2 = Watching(_evenly, _size_of_each, _patches, _in_one_run)
_QWEN3 = Watching(
    _from_end_to_end,
    _size_of_all,
    _patches,
    _with_times,
    Frames(16, least=128 * 32 * 32, most=768 * 32 * 32, mean=(0.5, 0.5, 0.5), deviation=(0.5, 0.5, 0.5)),
)

# -- LLaVA-OneVision ------------------------------------------------------------------------------------------------


def _tile(config: Config, clip: Clip, num: int, frames: Frames, budget: int) -> tuple[int, int]:
    """The tower's own size."""
    side = int(config["vision_config"]["image_size"])
    return side, side


def _pixels(shown: Shown, frames: Frames) -> tuple[Arrays, Grid]:
    pixels = normalized(np.stack(shown), frames).transpose(0, 3, 1, 2)
    return {"pixel_values_videos": pixels[None]}, (len(shown), 1, 1)


def _pooled(config: Config, seen: Seen) -> Layout:
    """Each frame with half as many rows and columns as it has patches, and one row at the end."""
    vision = config["vision_config"]
    side = math.ceil(int(vision["image_size"]) // int(vision["patch_size"]) / 2)
    return Layout((seen.grid[0] * side * side + 1,))


_ONEVISION = Watching(_from_end_to_end, _tile, _pixels, _pooled, Frames(temporal=1, fewest=32, many=32))

#: Families whose videos are read.
WATCHING: Mapping[str, Watching] = {
    "llava_onevision": _ONEVISION,
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}


# -- what a tower reads --------------------------------------------------------------------------------------------


class VideoSense:
    """Implements `bridle.media.senses.Sense` for videos."""

    modality, written, is_mutual, is_whole = VIDEO, "", False, False

    def __init__(self, folder: Path, settings: PreTrainedConfig, family: Watching) -> None:
        self._folder, self._config, self._family = folder, settings.to_dict(), family
        self._frames: Frames | None = None
        self.placeholder = token_of(settings, "video_token_id", VIDEO)
        self.row_token = self.placeholder

    def read(self, file: Any, limits: MediaLimits, where: str) -> tuple[Arrays, Layout]:
        """Of a video in a file, a list or an array of frames, or these and their rate."""
        if self._frames is None:
            self._frames = Frames.of(read_settings(self._folder, _FILES, VIDEO), self._family.base)
        frames, family = self._frames, self._family
        clip = open_clip(file, limits, where) if isinstance(file, bytes) else check_clip(file, limits, where)
        if max(clip.width, clip.height) > MOST_RATIO * min(clip.width, clip.height):
            raise MediaRefused(f"{where} has frames with a side {MOST_RATIO} times as long as the other", where)
        chosen = range(clip.count) if clip.is_chosen else family.sample(clip, frames, limits.max_frames)
        budget = min(limits.max_video_pixels, limits.max_video_rows * frames.temporal * frames.side**2)
        height, width = family.size(self._config, clip, len(chosen), frames, budget)
        if (pixels := len(chosen) * height * width) > (most := 2 * limits.max_video_pixels):
            raise MediaRefused(f"{where} has {pixels} pixels, as this model is shown it; at most {most}", where)
        shown = [_resized(frame, width, height) for frame in clip.unpack(chosen)]
        arrays, grid = family.make(shown, frames)
        return arrays, family.lay_out(self._config, Seen(tuple(chosen), clip.count, clip.rate, frames.temporal, grid))


def _resized(frame: Image.Image, width: int, height: int) -> NDArray[np.uint8]:
    return np.asarray(frame.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))


def normalized(pixels: NDArray[np.uint8], frames: Frames) -> NDArray[np.float32]:
    """Colours [..., 3] as a tower has learned them."""
    mean, deviation = np.asarray(frames.mean, np.float32), np.asarray(frames.deviation, np.float32)
    found: NDArray[np.float32] = (pixels.astype(np.float32) / np.float32(255) - mean) / deviation
    return found


def patches_of(shown: Shown, frames: Frames) -> tuple[NDArray[np.float32], Grid]:
    """Frames [height, width, 3] -> patches [N, 3 x temporal x patch x patch], those of a row together, and how many
    there are by time, height and width. The last frame stands for those that are missing."""
    padded = [*shown, *[shown[-1]] * (-len(shown) % frames.temporal)]
    height, width = (side // frames.patch for side in shown[0].shape[:2])
    times = len(padded) // frames.temporal
    found = np.empty((times, height * width, 3 * frames.temporal * frames.patch**2), np.float32)
    for time in range(times):
        part = np.stack(padded[time * frames.temporal : (time + 1) * frames.temporal])
        pixels = normalized(part, frames)
        split = pixels.reshape(
            frames.temporal,
            *(height // frames.merge, frames.merge, frames.patch),
            *(width // frames.merge, frames.merge, frames.patch, 3),
        )
        found[time] = split.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(height * width, -1)
    return found.reshape(times * height * width, -1), (times, height, width)
