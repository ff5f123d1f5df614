"""Limits on images, sounds and videos, checked before anything is computed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bridle.errors import MediaRefused

#: The files that are read, by the names that they are declared with, and what Pillow calls them.
FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
#: The same for sounds, by what soundfile calls them. MP3 is also called by the format's own name.
SOUND_FORMATS = {
    **dict.fromkeys(("audio/wav", "audio/wave", "audio/x-wav", "audio/vnd.wave"), "WAV"),
    **dict.fromkeys(("audio/mpeg", "audio/mp3"), "MP3"),
    **dict.fromkeys(("audio/flac", "audio/x-flac"), "FLAC"),
    **dict.fromkeys(("audio/ogg", "audio/opus"), "OGG"),
}
#: The same for videos, by what they are; `frames` are pictures, in base64 with commas between them.
VIDEO_FORMATS = {
    **dict.fromkeys(("video/mp4", "video/quicktime", "video/webm", "video/x-matroska"), "film"),
    **dict.fromkeys(("image/gif", "image/webp"), "drawn"),
    "video/jpeg": "frames",
}
#: Pixels of a frame of a file, and frames in a second.
MOST_FRAME_PIXELS, MOST_FRAMES_A_SECOND = 10_000_000, 1_000
#: Rates of a sound in samples a second, and how many channels are mixed.
LEAST_RATE, MOST_RATE, MOST_CHANNELS = 1_000, 384_000, 16
#: Sides of a picture in pixels, and how much longer one may be than the other.
LEAST_SIDE, MOST_SIDE, MOST_RATIO = 2, 16_384, 200


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one request: images, sounds and videos, bytes of each file and of all, pixels of each image, seconds
    of each sound and video. A model sees at most `max_shown_pixels` of an image; larger images are reduced. It sees
    at most `max_frames` of a video, with at most `max_video_pixels` and `max_video_rows` together. Decoding a sound
    or a video may take `decode_seconds`. The arrays of all have at most `max_array_bytes`. All files of other
    servers together may take `fetch_seconds`."""

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
    """The time that a file has to be unpacked, from now on."""

    def __init__(self, limits: MediaLimits, where: str) -> None:
        self._seconds, self._where = limits.decode_seconds, where
        self._end = time.monotonic() + self._seconds

    def check(self) -> None:
        """Raise `MediaRefused` once the time has run out."""
        if time.monotonic() > self._end:
            raise MediaRefused(f"{self._where} takes more than {self._seconds:g} seconds to unpack", self._where)
