"""What pictures may cost, before anything is computed for them."""

from __future__ import annotations

from dataclasses import dataclass

#: The files that are read, by the names that they are declared with, and what Pillow calls them.
FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
#: Sides of a picture in pixels, and how much longer one may be than the other.
LEAST_SIDE, MOST_SIDE, MOST_RATIO = 2, 16_384, 200


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one request: pictures, bytes of each file and of all, pixels of each file. What a model is given of a
    picture has at most `max_shown_pixels`; larger ones are made smaller. What it is
    given of all has at most `max_array_bytes`. Pictures of other servers have `fetch_seconds` to arrive, all of them
    together."""

    max_images: int = 16
    max_image_bytes: int = 16 << 20
    max_total_bytes: int = 24 << 20
    max_pixels: int = 64_000_000
    max_shown_pixels: int = 2_000_000
    max_array_bytes: int = 512 << 20
    fetch_seconds: float = 10.0
