"""Decodes untrusted video files to frames. Only listed formats are tried. Sizes and lengths are checked in the header
before anything is decoded. Decoding has a time limit. Error messages of libraries are not passed on. A clip decodes
only the requested frames, one after the other, and keeps no other frames in memory.
"""

from __future__ import annotations

import io
import itertools
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from bridle.distribution import install_hint
from bridle.errors import InvalidRequest, MediaRefused, UnsupportedFeature
from bridle.multimodal.image_decoding import check_picture, open_picture
from bridle.multimodal.limits import (
    LEAST_SIDE,
    MOST_FRAME_PIXELS,
    MOST_FRAMES_A_SECOND,
    MOST_SIDE,
    MediaLimits,
    UnpackTimer,
)
from bridle.multimodal.sources import read_url

#: Frames per second of frames that a client has selected itself, unless the client states another rate.
CHOSEN_RATE = 2.0
#: FFmpeg's names of the supported codecs.
_CODECS = frozenset({"av1", "h264", "hevc", "libdav1d", "mpeg4", "vp8", "vp9", "libvpx", "libvpx-vp9"})
#: Limits of a decoder, for any frame size in the video data.
_BOUNDS = {"max_pixels": str(MOST_FRAME_PIXELS)}
#: The tables of an MP4 that have the number of samples, and the maximum of this number.
_TABLES, _MOST_SAMPLES = re.compile(b"stsz|stz2|trun"), 2_000_000

Unpack = Callable[[Sequence[int]], Iterator[Image.Image]]


@dataclass(frozen=True, slots=True)
class Clip:
    """A video of `count` frames at `rate` frames per second. If `is_chosen`, the caller has selected the frames, and
    the model reads all of them. `unpack` yields the frames at given increasing indices, in RGB."""

    count: int
    rate: float
    width: int
    height: int
    unpack: Unpack
    is_chosen: bool = False

    def checked(self, limits: MediaLimits, where: str) -> Clip:
        """Return this clip if its size, rate and length are within the limits; raise `MediaRefused` otherwise."""
        size = f"{where} has frames of {self.width} x {self.height} pixels"
        if min(self.width, self.height) < LEAST_SIDE or max(self.width, self.height) > MOST_SIDE:
            raise MediaRefused(f"{size}; each side must have {LEAST_SIDE} to {MOST_SIDE} pixels", where)
        if self.width * self.height > MOST_FRAME_PIXELS:
            raise MediaRefused(f"{size}; at most {MOST_FRAME_PIXELS} pixels in all", where)
        if not 0 < self.rate <= MOST_FRAMES_A_SECOND:
            raise MediaRefused(f"{where} has {self.rate:g} frames a second; at most {MOST_FRAMES_A_SECOND}", where)
        if self.count > limits.max_video_seconds * self.rate:
            seconds = self.count / self.rate
            raise MediaRefused(f"{where} takes {seconds:.0f} seconds; at most {limits.max_video_seconds:g}", where)
        if self.count < 1:
            raise MediaRefused(f"{where} is empty", where)
        return self


def open_clip(data: bytes, limits: MediaLimits, where: str = "video") -> Clip:
    """Open the video in a file. Raises `MediaRefused` with bridle's own message."""
    if len(data) > limits.max_image_bytes:
        raise MediaRefused(f"{where} has {len(data)} bytes; at most {limits.max_image_bytes}", where)
    clock = UnpackTimer(limits, where)
    is_drawn = data[:4] == b"GIF8" or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")
    is_film = data[4:8] == b"ftyp" or data[:4] == b"\x1a\x45\xdf\xa3"
    try:
        if not is_drawn and not is_film:
            raise ValueError
        clip = _animation(data, limits, where, clock) if is_drawn else _film(data, where, clock)
    except InvalidRequest:
        raise
    except Exception:  # any error of a decoder; its message is not for clients
        raise unreadable(where) from None
    clip = clip.checked(limits, where)
    return replace(clip, unpack=_guarded(clip.unpack, where))


def unreadable(where: str) -> MediaRefused:
    return MediaRefused(f"{where} cannot be read: it is damaged, or no MP4, WebM, GIF or WebP", where)


def _guarded(unpack: Unpack, where: str) -> Unpack:
    """Wrap `unpack` so that its errors become `MediaRefused` with bridle's own messages."""

    def guarded(indices: Sequence[int]) -> Iterator[Image.Image]:
        frames = unpack(indices)
        for _ in indices:
            try:
                frame = next(frames)
            except InvalidRequest:
                raise
            except Exception:
                raise unreadable(where) from None
            yield frame

    return guarded


# -- drawn ------------------------------------------------------------------------------------------------------


def _animation(data: bytes, limits: MediaLimits, where: str, clock: UnpackTimer) -> Clip:
    """Open a GIF or a WebP. Frames may have different durations, but all frames are treated as if they had the duration
    of the first one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Image.open(io.BytesIO(data), formats=("GIF", "WEBP"))
        count = getattr(file, "n_frames", 1)

    def unpack(indices: Sequence[int]) -> Iterator[Image.Image]:
        next_one = 0
        for index in indices:
            for number in range(next_one, index + 1):  # each frame is drawn on the previous one
                clock.check()
                file.seek(number)
            next_one = index + 1
            yield check_picture(file, limits)

    sized = Clip(1, 1.0, *file.size, unpack).checked(limits, where)
    file.load()  # only then a WebP has the duration of a frame
    milliseconds = max(float(file.info.get("duration") or 0), 20.0)  # browsers show every frame at least this long
    return replace(sized, count=count, rate=1_000 / milliseconds)


# -- filmed -----------------------------------------------------------------------------------------------------


def _film(data: bytes, where: str, clock: UnpackTimer) -> Clip:
    """Open an MP4 or a WebM. The file's packets are counted, because a header may lack the number of frames."""
    try:
        import av
    except ImportError:
        raise UnsupportedFeature(f"{where} is a video file; to read it, run `{install_hint('video')}`", where) from None
    is_mp4 = data[4:8] == b"ftyp"
    if is_mp4:
        _check_samples(data)

    def opened() -> Any:
        return av.open(io.BytesIO(data), format="mp4" if is_mp4 else "matroska", options=dict(_BOUNDS))

    with opened() as container:
        stream = container.streams.video[0]
        if stream.codec_context.name not in _CODECS:
            raise ValueError
        rate = float(stream.average_rate or stream.guessed_rate or CHOSEN_RATE)
        width, height = stream.codec_context.width, stream.codec_context.height
        count = 0
        for packet in container.demux(stream):
            clock.check()
            count += bool(packet.size)

    def unpack(indices: Sequence[int]) -> Iterator[Image.Image]:
        wanted, last = set(indices), None
        with opened() as container:
            context = container.streams.video[0].codec_context
            context.options, context.thread_count = dict(_BOUNDS), 1
            for index, frame in enumerate(container.decode(video=0)):
                clock.check()
                if (frame.width, frame.height) != (width, height):
                    raise ValueError
                if index in wanted:
                    last = frame.to_image()
                    yield last
        yield from itertools.repeat(last)  # decoders may not return the last frames

    return Clip(count, rate, width, height, unpack)


def _check_samples(data: bytes) -> None:
    """Raise `MediaRefused` for an MP4 whose sample tables claim more samples than any real film has. A few bytes can
    claim this, and the decoder would trust them. This function finds the tables outside of the video data. Compressed
    tables are refused, too."""
    start = 0
    while start + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, start)
        size = struct.unpack_from(">Q", data, start + 8)[0] if size == 1 else size or len(data) - start
        if size < 8 or (kind != b"mdat" and b"cmov" in data[start : start + size]):
            raise ValueError
        for found in _TABLES.finditer(data, start, start + size) if kind != b"mdat" else ():
            offset = found.end() + (4 if found[0] == b"trun" else 8)
            if struct.unpack_from(">I", data, offset)[0] > _MOST_SAMPLES:
                raise ValueError
        start += size


# -- already chosen -----------------------------------------------------------------------------------------------


def check_clip(value: Any, limits: MediaLimits, where: str = "video") -> Clip:
    """Return a clip from frames that a Python program passes: a list of images, or an array (frames, height, width, 3).
    If only frames are given, the model reads all frames. If a rate is given as well, frames are sampled as from a
    video."""
    frames, rate = value, None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float)):
        frames, rate = value
    if not isinstance(frames, (list, tuple)) and not (isinstance(frames, np.ndarray) and frames.ndim == 4):
        raise MediaRefused(
            f"{where} is {type(value).__name__}; must be bytes, a path, a list or an array of frames, or frames with "
            "their frame rate",
            where,
        )
    if rate is None and len(frames) > limits.max_frames:
        raise MediaRefused(f"{where} has {len(frames)} frames; at most {limits.max_frames}", where)
    if not len(frames):
        raise MediaRefused(f"{where} is empty", where)
    clock = UnpackTimer(limits, where)
    first = _frame(frames[0], limits, f"{where}[0]", clock)

    def unpack(indices: Sequence[int]) -> Iterator[Image.Image]:
        for index in indices:
            yield _frame(frames[index], limits, f"{where}[{index}]", clock) if index else first

    clip = Clip(len(frames), rate or CHOSEN_RATE, *first.size, unpack, is_chosen=rate is None)
    return clip.checked(limits, where)


def _frame(value: Any, limits: MediaLimits, where: str, clock: UnpackTimer) -> Image.Image:
    data = read_url(value, limits, where) if isinstance(value, str) else value
    if not isinstance(data, bytes):
        return check_picture(data, limits, where)
    clock.check()
    return open_picture(data, limits, where)
