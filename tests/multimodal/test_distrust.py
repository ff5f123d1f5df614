"""Tests that common image files are decoded, and damaged or hostile ones refused with bridle's own error before they
are decompressed."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bridle.errors import MediaRefused
from bridle.multimodal import MediaLimits, check_picture, open_picture
from tests.multimodal.hostile_files import check_changed_headers, header_of_png

LIMITS = MediaLimits()


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 40, height: int = 30, channels: int = 3, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, channels), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_common_files_are_read(kind: str) -> None:
    found = open_picture(saved(noise(), kind), LIMITS)
    assert (found.mode, found.size) == ("RGB", (40, 30))


def test_pictures_are_upright_opaque_and_in_colour() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # held sideways
    assert open_picture(saved(noise(), "JPEG", exif=exif), LIMITS).size == (30, 40)
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert open_picture(saved(clear, "PNG"), LIMITS).getpixel((4, 4)) == (255, 255, 255)
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([10, 20, 30] * 256)
    assert open_picture(saved(palette, "PNG", transparency=0), LIMITS).getpixel((4, 4)) == (255, 255, 255)
    assert open_picture(saved(noise().convert("L"), "PNG"), LIMITS).mode == "RGB"
    assert open_picture(saved(noise().convert("CMYK"), "JPEG"), LIMITS).mode == "RGB"
    assert open_picture(saved(Image.new("I;16", (8, 8), 9), "PNG"), LIMITS).mode == "RGB"


def test_only_the_first_frame_is_seen() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        found = open_picture(saved(frames[0], kind, save_all=True, append_images=frames[1:]), LIMITS)
        red, _, blue = found.getpixel((4, 4))  # type: ignore[misc]
        assert red > 200 > 60 > blue


def test_large_pictures_are_made_smaller() -> None:
    limits = MediaLimits(max_shown_pixels=3_000)
    assert open_picture(saved(noise(300, 100), "PNG"), limits).size == (94, 31)
    exif = Image.Exif()
    exif[0x0112] = 6  # held sideways
    for kind in ("JPEG", "PNG", "WEBP"):
        assert open_picture(saved(noise(300, 100), kind, exif=exif), limits).size == (31, 94)
    palette = noise(300, 100).quantize(16)
    assert open_picture(saved(palette, "PNG", exif=exif), limits).size == (31, 94)
    clear = Image.new("RGBA", (300, 100), (255, 0, 0, 0))
    assert open_picture(saved(clear, "PNG"), limits).getpixel((9, 9)) == (255, 255, 255)
    assert check_picture(noise(300, 100), MediaLimits(max_shown_pixels=3_000)).size == (94, 31)


SIZES = [
    (1, 1, "1 x 1 pixels; each side must have 2 to 16384"),
    (16_385, 16, "16385 x 16 pixels; each side must have"),
    (2**31 - 1, 2**31 - 1, "each side must have|cannot be read"),  # Pillow itself refuses it
    (3, 700, "no side may be more than 200 times as long"),
    (12_000, 12_000, "at most 64000000 pixels in all"),
]


@pytest.mark.parametrize(("width", "height", "why"), SIZES)
def test_sizes_are_judged_by_the_header(width: int, height: int, why: str) -> None:
    with pytest.raises(MediaRefused, match=why):
        open_picture(header_of_png(width, height), LIMITS)


DAMAGED: dict[str, bytes] = {
    "nothing": b"",
    "text": b"not a picture at all",
    "a page that says it is a picture": b"GIF89a<html><script>alert(1)</script>",
    "cut off": saved(noise(), "PNG")[:200],
    "cut off in its head": saved(noise(), "JPEG")[:20],
    "a size without data": header_of_png(500, 500),
    "of a kind that is not read": saved(noise(), "TIFF"),
    "of a kind that runs a program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "a bitmap": saved(noise(), "BMP"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_without_a_word_of_the_library(name: str) -> None:
    with pytest.raises(MediaRefused) as caught:
        open_picture(DAMAGED[name], LIMITS, "messages[0].content[1]")
    assert str(caught.value) == "messages[0].content[1] cannot be read: it is damaged, or not a PNG, JPEG, WebP or GIF"
    assert caught.value.__suppress_context__


def test_what_follows_a_picture_is_not_looked_at() -> None:
    data = saved(noise(), "PNG")
    found = open_picture(data + b"PK\x03\x04 a zip behind it" * 40, LIMITS)
    assert found.tobytes() == open_picture(data, LIMITS).tobytes()


def test_files_have_a_limit() -> None:
    with pytest.raises(MediaRefused, match="has 101 bytes; at most 100"):
        open_picture(bytes(101), MediaLimits(max_image_bytes=100))


BOMB = """
import resource, sys, struct, zlib
from bridle.multimodal import MediaLimits, open_picture
from bridle.errors import MediaRefused
from tests.multimodal.hostile_files import header_of_png
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for size in ((12_000, 12_000), (16_384, 3_900)):
    try:
        open_picture(header_of_png(*size), MediaLimits())
    except MediaRefused as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_a_bomb_takes_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", BOMB], capture_output=True, text=True, check=True)
    *sentences, grown = done.stdout.splitlines()
    assert len(sentences) == 2
    assert int(grown) < 300  # MiB; the first would be 412 in RGB alone


def read_small(data: bytes) -> None:
    limits = MediaLimits(max_pixels=1_000_000)
    found = open_picture(data, limits)
    assert found.mode == "RGB" and found.width * found.height <= limits.max_pixels


SMALL = [saved(noise(24, 18, seed=number), kind) for number, kind in enumerate(("PNG", "JPEG", "WEBP", "GIF"))]


def test_changed_headers_are_read_or_refused() -> None:
    check_changed_headers(SMALL, read_small)


@pytest.mark.slow
def test_many_changed_headers() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_changed_headers(SMALL, read_small, 2_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
