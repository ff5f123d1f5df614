"""Common code for model families that read videos: a checkpoint's frame settings, the selected frames, and their
conversion to the tower's input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bridle.multimodal.families import Arrays, Config, PlaceholderLayout
from bridle.multimodal.video_decoding import Clip

Shown = Sequence[NDArray[np.uint8]]
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Frames:
    """Frame settings of a checkpoint. A patch has `patch` x `patch` pixels over `temporal` frames, and `merge` x
    `merge` patches give one feature row. A frame is resized to between `least` and `most` pixels. Frames are sampled at
    `rate` frames per second; at least `fewest` and at most `many` frames are used. Square frames have `edge` pixels
    along a side. Clips over `longest` seconds are sampled at a lower rate."""

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
    edge: int = 364
    longest: float = 300.0

    @classmethod
    def of(cls, settings: Mapping[str, Any], base: Frames) -> Frames:
        """Return the settings of a checkpoint; missing settings are taken from `base`."""
        size, square = settings.get("size") or {}, settings.get("max_image_size") or {}
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
            int(square.get("longest_edge") or base.edge),
            float(settings.get("max_duration") or base.longest),
        )

    @property
    def side(self) -> int:
        """Return the number of pixels along one side of the area that gives one feature row."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class SelectedFrames:
    """The frames with these `indices`, selected from a clip of `count` frames at `rate` per second. `grid` is the
    number of rows in time, height and width."""

    indices: tuple[int, ...]
    count: int
    rate: float
    temporal: int
    grid: Grid

    @property
    def seconds(self) -> float:
        """Return the seconds between two consecutive times of the grid."""
        return self.temporal / (len(self.indices) / self.count * self.rate)

    @property
    def duration(self) -> float:
        """Return the duration of the whole clip, in seconds."""
        return self.count / self.rate

    @property
    def starts(self) -> list[float]:
        """Return for each time of the grid the time of its first frame in the clip, in seconds."""
        return [index / self.rate for index in self.indices[:: self.temporal]]

    @property
    def times(self) -> list[float]:
        """Return for each time of the grid the mean time of its first and last frame, in seconds."""
        padded = [*self.indices, *[self.indices[-1]] * (-len(self.indices) % self.temporal)]
        ends = zip(padded[:: self.temporal], padded[self.temporal - 1 :: self.temporal], strict=True)
        return [(first / self.rate + last / self.rate) / 2 for first, last in ends]


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """Settings of a model family's video input. `sample` selects frames, and `size` returns the size (height, width) to
    which the selected frames are resized. `make` returns the tower's input with its grid in time, height and width.
    `lay_out` returns the placeholder's layout. `base` has the processor's defaults. The configuration field named
    `rows_in` has the token that stands at each feature row of the prompt. The placeholder token of a video is in
    `video_token_id`, or is the first of `places` that the tokenizer knows. Templates may write the text `written`,
    which is not a token. `settings` converts a checkpoint's settings to the fields of `Frames`. If frames have a fixed
    size, `rows` returns the rows of each frame. Frames are resized with the filter `resample`, first to the
    intermediate size `via` if it is given."""

    sample: Callable[[Clip, Frames, int], Sequence[int]]
    size: Callable[[Config, Clip, int, Frames, int], tuple[int, int]]
    make: Callable[[Shown, Frames], tuple[Arrays, Grid]]
    lay_out: Callable[[Config, SelectedFrames], PlaceholderLayout]
    base: Frames = Frames()
    rows_in: str = "video_token_id"
    places: tuple[str, ...] = ()
    written: str = ""
    settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    rows: Callable[[Config], int] | None = None
    via: Callable[[Clip, Frames], tuple[int, int]] | None = None
    resample: Image.Resampling = Image.Resampling.BICUBIC

    def draw(self, frame: Image.Image, clip: Clip, frames: Frames, height: int, width: int) -> NDArray[np.uint8]:
        """Resize a frame to the size that the model reads: [height, width, 3]."""
        frame = frame.convert("RGB")
        if self.via is not None:
            tall, wide = self.via(clip, frames)
            frame = frame.resize((wide, tall), self.resample)
        return np.asarray(frame.resize((width, height), self.resample))


def normalized(pixels: NDArray[np.uint8], frames: Frames) -> NDArray[np.float32]:
    """Normalize colours [..., 3] with the tower's mean and standard deviation."""
    mean, deviation = np.asarray(frames.mean, np.float32), np.asarray(frames.deviation, np.float32)
    found: NDArray[np.float32] = (pixels.astype(np.float32) / np.float32(255) - mean) / deviation
    return found


def patches_of(shown: Shown, frames: Frames) -> tuple[NDArray[np.float32], Grid]:
    """Convert frames [height, width, 3] to patches [N, 3 x temporal x patch x patch], with the patches of one feature
    row adjacent. Also return the numbers of patches in time, height and width. If the number of frames is not a
    multiple of `temporal`, the last frame is repeated."""
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
