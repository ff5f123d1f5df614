"""Video settings of model families that read the frames of a video like images. Each frame is a separate run of rows,
with text between the frames."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
from PIL import Image

from bridle.multimodal.families import Arrays, Config, PlaceholderLayout, idefics_rows, internvl_rows, pair
from bridle.multimodal.video_decoding import Clip
from bridle.multimodal.video_frames import Frames, FrameSampling, Grid, SelectedFrames, Shown, normalized

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
#: Frames of a video that InternVL uses by default, if the checkpoint does not state a number.
_INTERNVL_FRAMES = 8
#: Maximum of a frame's longest side in SmolVLM's processor.
_LONGEST_SIDE = 4_096


# -- SmolVLM ------------------------------------------------------------------------------------------------------


def _smolvlm_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the video processor's settings with frame sampling in the usual fields. Checkpoints by the model's authors
    have frame sampling in the field `video_sampling`."""
    sampling = settings.get("video_sampling") or {}
    return {
        **settings,
        "max_frames": sampling.get("max_frames") or settings.get("num_frames"),
        "fps": sampling.get("fps") or settings.get("fps"),
        "size": sampling.get("video_size") or settings.get("size"),
    }


def _without_ends(clip: Clip, frames: Frames, many: int) -> list[int]:
    """Return the indices of frames at equal distances. In a long video, the first and the last second are left out."""
    seconds = clip.count / clip.rate
    num = max(min(round(frames.rate * seconds), frames.many, many), 1)
    first, last = 0, clip.count - 1
    if seconds - 2 > frames.many * frames.rate:
        first, last = int(clip.rate), min(int(clip.count - clip.rate), last)
    if first >= last:
        first, last = 0, clip.count - 1
    return [int(index) for index in np.unique(np.linspace(first, last, num, dtype=int))]


def _with_longest_side(clip: Clip, frames: Frames) -> tuple[int, int]:
    """Return the height and width of the intermediate size before a frame is resized to a square."""
    longest, ratio = min(_LONGEST_SIDE, frames.most), clip.width / clip.height
    if clip.width >= clip.height:
        height = int(longest / ratio)
        return max(height + height % 2, 1), longest
    width = int(longest * ratio)
    return longest, max(width + width % 2, 1)


def _square(config: Config, clip: Clip, num: int, frames: Frames, budget: int) -> tuple[int, int]:
    return frames.edge, frames.edge


def _one_batch(shown: Shown, frames: Frames) -> tuple[Arrays, Grid]:
    arrays, grid = _tiles(shown, frames)
    return {"pixel_values": arrays["pixel_values"][None]}, grid


def _introduced(config: Config, seen: SelectedFrames) -> PlaceholderLayout:
    """Lay out a text with the number of frames, then each frame after its time. Each frame is between the marker tokens
    of an image."""
    rows, around = idefics_rows(config), "<fake_token_around_image>"
    length = timedelta(seconds=int(seen.duration))
    text = f"You are provided the following series of {in_words(len(seen.indices))} frames from a {length} "
    text += "[H:MM:SS] video.\n"
    parts: list[int | str] = []
    for start in seen.starts:
        minutes, seconds = divmod(int(start), 60)
        parts += [f"{text}\nFrame from {minutes:02d}:{seconds:02d}:{around}<global-img>", rows]
        text = around
    return PlaceholderLayout((*parts, f"{text}\n\n"))


def in_words(number: int) -> str:
    """Return a number below 1,000 as English words."""
    if number >= 100:
        rest = f" and {in_words(number % 100)}" if number % 100 else ""
        return f"{_ONES[number // 100]} hundred{rest}"
    if number < 20:
        return _ONES[number]
    return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")


# -- InternVL -----------------------------------------------------------------------------------------------------


def _internvl_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**settings, "max_frames": settings.get("num_frames")}


def _from_the_middle(clip: Clip, frames: Frames, many: int) -> list[int]:
    """Return the index of the frame in the middle of each of several equal parts of the clip. There is one part for
    each frame to show, and at most `many` parts."""
    by_rate = int(clip.count / clip.rate * frames.rate) if frames.rate else _INTERNVL_FRAMES
    num = max(min(frames.many or by_rate, many, clip.count), 1)
    step = clip.count / num
    return [int(np.float32(step / 2 + step * number)) for number in range(num)]  # rounded to float32 as in transformers


def _tile(config: Config, clip: Clip, num: int, frames: Frames, budget: int) -> tuple[int, int]:
    return pair(config["vision_config"]["image_size"])


def _tiles(shown: Shown, frames: Frames) -> tuple[Arrays, Grid]:
    """Return the frames as an array of tiles [frames, 3, height, width], with their grid."""
    return {"pixel_values": normalized(np.stack(shown), frames).transpose(0, 3, 1, 2)}, (len(shown), 1, 1)


def _numbered(config: Config, seen: SelectedFrames) -> PlaceholderLayout:
    """Lay out each frame after its number, one text line per frame."""
    parts: list[int | str] = []
    for number in range(1, len(seen.indices) + 1):
        end = "</img>\n" if parts else ""
        parts += [f"{end}Frame{number}: <img>", internvl_rows(config)]
    return PlaceholderLayout((*parts, "</img>"))


# -- GLM-4V -------------------------------------------------------------------------------------------------------


def by_seconds(clip: Clip, frames: Frames, many: int) -> list[int]:
    """Return the indices of frames at a fixed rate. Only a fixed number of frames is used from a video that takes over
    `longest` seconds. If the number of frames is odd, the code that makes patches repeats the last frame."""
    last, seconds = clip.count - 1, clip.count / clip.rate
    most = min(int(frames.longest * frames.rate), many // frames.temporal * frames.temporal)
    num = max(math.floor(seconds * frames.rate), 1)
    if seconds <= frames.longest and num <= most:
        times = [number * clip.rate / frames.rate for number in range(num)]
    elif most >= clip.count:
        times = [float(index) for index in range(clip.count)]
    else:
        times = [time * clip.rate for time in np.linspace(0, seconds, most)]
    return sorted({min(last, math.ceil(time)) for time in times})


def behind_frames(config: Config, seen: SelectedFrames) -> PlaceholderLayout:
    """Lay out one run for every two frames, followed by the time of the first frame in seconds."""
    _, height, width = seen.grid
    parts: list[int | str] = []
    text = ""
    for start in seen.starts:
        parts += [f"{text}<|begin_of_image|>", height * width]
        text = f"<|end_of_image|>{int(start)}"
    return PlaceholderLayout((*parts, text), (1, height, width))


_HALVES = (0.5, 0.5, 0.5)
_SMOLVLM = Frames(temporal=1, most=1_456, rate=1.0, many=64, mean=_HALVES, deviation=_HALVES)

AS_PICTURES: Mapping[str, FrameSampling] = {
    "internvl": FrameSampling(
        _from_the_middle,
        _tile,
        _tiles,
        _numbered,
        Frames(temporal=1, rate=0.0, many=0),
        rows_in="image_token_id",
        places=("<video>",),
        settings=_internvl_settings,
        rows=internvl_rows,
    ),
    "smolvlm": FrameSampling(
        _without_ends,
        _square,
        _one_batch,
        _introduced,
        _SMOLVLM,
        rows_in="image_token_id",
        places=("<video>", "<global-img>"),  # the second one is in no prompt that a template writes
        written="<video>",
        settings=_smolvlm_settings,
        rows=idefics_rows,
        via=_with_longest_side,
        resample=Image.Resampling.LANCZOS,
    ),
}
