"""Limits on images, sounds and videos, checked before anything is computed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bridle.errors import MediaRefused

#: Supported image types by their media types, with Pillow's names.
FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
#: Supported sound types by their media types, with soundfile's names. MP3 also has the format's own name.
SOUND_FORMATS = {
    **dict.fromkeys(("audio/wav", "audio/wave", "audio/x-wav", "audio/vnd.wave"), "WAV"),
    **dict.fromkeys(("audio/mpeg", "audio/mp3"), "MP3"),
    **dict.fromkeys(("audio/flac", "audio/x-flac"), "FLAC"),
    **dict.fromkeys(("audio/ogg", "audio/opus"), "OGG"),
}
#: Supported video types by their media types. `frames` are images in base64, separated by commas.
VIDEO_FORMATS = {
    **dict.fromkeys(("video/mp4", "video/quicktime", "video/webm", "video/x-matroska"), "film"),
    **dict.fromkeys(("image/gif", "image/webp"), "drawn"),
    "video/jpeg": "frames",
}
#: Maximum pixels of a frame, and frames per second.
MOST_FRAME_PIXELS, MOST_FRAMES_A_SECOND = 10_000_000, 1_000
#: Minimum and maximum sampling rates of a sound, and the maximum number of channels.
LEAST_RATE, MOST_RATE, MOST_CHANNELS = 1_000, 384_000, 16
#: Minimum and maximum side of an image in pixels, and the maximum ratio of its sides.
LEAST_SIDE, MOST_SIDE, MOST_RATIO = 2, 16_384, 200


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one request. Images with more than `max_shown_pixels` are scaled down to this number of pixels. A model
    reads at most `max_frames` frames of a video, which together have at most `max_video_pixels` pixels and
    `max_video_rows` rows in the prompt. Decoding one sound or video may take at most `decode_seconds`. The arrays of
    all files together have at most `max_array_bytes`. Fetching files from other servers may take `fetch_seconds` in
    total."""

    max_images: int = 16
    max_sounds: int = 16
    max_videos: int = 4
    max_sound_seconds: float = 1_800.0
    max_video_seconds: float = 3_600.0
    max_frames: int = 240
    max_video_pixels: int = 16_000_000
    max_video_rows: int = 16_384
    decode_seconds: float = 20.0
    max_image_bytes: int = 16 << 20
    max_total_bytes: int = 24 << 20
    max_pixels: int = 64_000_000
    max_shown_pixels: int = 2_000_000
    max_array_bytes: int = 512 << 20
    fetch_seconds: float = 10.0


class UnpackTimer:
    """A timer for the decoding of one file, which starts when it is created."""

    def __init__(self, limits: MediaLimits, where: str) -> None:
        self._seconds, self._where = limits.decode_seconds, where
        self._end = time.monotonic() + self._seconds

    def check(self) -> None:
        """Raise `MediaRefused` if decoding has taken longer than the limit."""
        if time.monotonic() > self._end:
            raise MediaRefused(f"{self._where} takes more than {self._seconds:g} seconds to decode", self._where)
