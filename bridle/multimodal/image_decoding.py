"""Decodes untrusted image files. Sizes are checked in the header before anything is decoded, and only listed formats
are tried. Error messages of libraries are not passed on, because they may contain memory addresses of this process.

The result is the first frame in RGB, rotated by the camera's orientation tag, with white behind transparent parts.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

from PIL import Image, ImageOps

from bridle.errors import MediaRefused
from bridle.multimodal.limits import FORMATS, LEAST_SIDE, MOST_RATIO, MOST_SIDE, MediaLimits


def open_picture(data: bytes, limits: MediaLimits, where: str = "image") -> Image.Image:
    """Decode the image in a file. Raises `MediaRefused` with bridle's own message."""
    if len(data) > limits.max_image_bytes:
        raise MediaRefused(f"{where} has {len(data)} bytes; at most {limits.max_image_bytes}", where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=tuple(FORMATS.values())) as file:
                _check_size(*file.size, limits, where)
                file.seek(0)
                if file.format == "JPEG":  # decoded at a fraction of its size, if that is large enough
                    file.draft("RGB", _shown_size(*file.size, limits))
                file.load()
                return normalized(file, limits)
    except MediaRefused:
        raise
    except Exception:  # any error of a decoder; its message may contain addresses, and is not for clients
        raise MediaRefused(f"{where} cannot be read: it is damaged, or not a PNG, JPEG, WebP or GIF", where) from None


def check_picture(value: Any, limits: MediaLimits, where: str = "image") -> Image.Image:
    """Convert an image that a Python program passes, a Pillow image or an array, to the form that models read."""
    picture = value if isinstance(value, Image.Image) else _from_array(value, where)
    _check_size(*picture.size, limits, where)
    try:
        return normalized(picture, limits)
    except Exception:
        raise MediaRefused(f"{where} cannot be read: it is damaged or has an unsupported pixel format", where) from None


def _from_array(value: Any, where: str) -> Image.Image:
    try:
        return Image.fromarray(value)
    except Exception:
        kind = type(value).__name__
        raise MediaRefused(f"{where} is {kind}; must be bytes, a path, an array or a Pillow image", where) from None


def normalized(picture: Image.Image, limits: MediaLimits) -> Image.Image:
    """Return the image upright, opaque, in RGB, and scaled down to at most `max_shown_pixels`. The image is scaled down
    first, because later operations need memory in proportion to the image's size."""
    is_clear = picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info
    if picture.mode not in ("RGB", "RGBA", "L", "LA", "CMYK") or (is_clear and picture.mode in ("RGB", "L")):
        picture = _converted(picture, "RGBA" if is_clear else "RGB")
    shown = _shown_size(*picture.size, limits)
    if shown != picture.size:
        exif = picture.getexif()
        picture = picture.resize(shown, Image.Resampling.BICUBIC)
        picture.getexif().update(exif)
    picture = ImageOps.exif_transpose(picture)
    if is_clear:
        layer = picture.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, layer)
    return picture.convert("RGB")


def _converted(picture: Image.Image, mode: str) -> Image.Image:
    """Convert an image to another mode, and keep its orientation tag."""
    exif = picture.getexif()
    converted = picture.convert(mode)
    converted.getexif().update(exif)
    return converted


def _shown_size(width: int, height: int, limits: MediaLimits) -> tuple[int, int]:
    """Return the size to which an image is scaled down, so that it has at most `max_shown_pixels`; small images keep
    their size."""
    if width * height <= limits.max_shown_pixels:
        return width, height
    scale = math.sqrt(limits.max_shown_pixels / (width * height))
    return max(int(width * scale), LEAST_SIDE), max(int(height * scale), LEAST_SIDE)


def _check_size(width: int, height: int, limits: MediaLimits, where: str) -> None:
    size = f"{where} has {width} x {height} pixels"
    if min(width, height) < LEAST_SIDE or max(width, height) > MOST_SIDE:
        raise MediaRefused(f"{size}; each side must have {LEAST_SIDE} to {MOST_SIDE} pixels", where)
    if max(width, height) > MOST_RATIO * min(width, height):
        raise MediaRefused(f"{size}; no side may be more than {MOST_RATIO} times as long as the other", where)
    if width * height > limits.max_pixels:
        raise MediaRefused(f"{size}; at most {limits.max_pixels} pixels in all", where)
