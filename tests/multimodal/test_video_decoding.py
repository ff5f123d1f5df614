"""Tests that common, damaged and hostile video files are decoded, or refused with bridle's own error."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bridle.errors import MediaRefused, UnsupportedFeature
from bridle.multimodal import MediaLimits, Source, open_reader, source_of
from bridle.multimodal.video_decoding import Clip, check_clip, open_clip
from tests.fakes import vision_checkpoints
from tests.multimodal.clips import GREYS, film, plain
from tests.multimodal.hostile_files import check_changed_headers

LIMITS = MediaLimits()


def drawn(kind: str = "GIF", shown: Sequence[Image.Image] = (), **options: Any) -> bytes:
    file = io.BytesIO()
    first, *rest = shown or plain()
    first.save(file, kind, save_all=True, append_images=rest, duration=250, **options)
    return file.getvalue()


def greys(clip: Clip, indices: Sequence[int]) -> list[int]:
    return [int(np.asarray(frame).mean()) for frame in clip.unpack(indices)]


FILES = {
    "MP4": film(),
    "WebM": film("webm", "libvpx-vp9"),
    "GIF": drawn(),
    "WebP": drawn("WEBP", lossless=True),
}


@pytest.mark.parametrize("name", FILES)
def test_common_files_are_read(name: str) -> None:
    clip = open_clip(FILES[name], LIMITS)
    assert (clip.count, clip.width, clip.height) == (8, 64, 48)
    assert clip.rate == pytest.approx(4.0)
    for indices in ([0, 3, 7], list(range(8)), [5]):
        wanted = [GREYS[index] for index in indices]
        assert np.abs(np.subtract(greys(clip, indices), wanted)).max() < 12


def test_frames_that_somebody_chose_are_all_seen() -> None:
    shown = plain()
    png = io.BytesIO()
    shown[0].save(png, "PNG")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    array = np.stack([np.asarray(frame) for frame in shown])
    for value in (shown, array, [url, *shown[1:]], [png.getvalue(), *shown[1:]]):
        clip = check_clip(value, LIMITS)
        assert clip.is_chosen and clip.rate == 2.0 and greys(clip, [0, 4]) == [0, 240]
    clip = check_clip((array, 30.0), LIMITS)
    assert not clip.is_chosen and clip.rate == 30.0


REFUSED: list[tuple[Any, str]] = [
    ([], "is empty"),
    (plain([0] * 241), "has 241 frames; at most 240"),
    ((plain(), 2_000.0), "has 2000 frames a second; at most 1000"),
    ((plain(), -1.0), "frames a second"),
    (plain([0], 1, 1), r"video\[0\] has 1 x 1 pixels"),
    (["https://example.org/x.png"], "does not fetch"),
    ("x", "must be bytes, a path, a list or an array"),
    (5, "must be bytes, a path, a list or an array"),
]


@pytest.mark.parametrize(("value", "why"), REFUSED)
def test_other_lists_are_refused(value: Any, why: str) -> None:
    with pytest.raises((MediaRefused, UnsupportedFeature), match=why):
        check_clip(value, LIMITS)


def test_limits_of_files() -> None:
    still = drawn("GIF", plain([0], 8, 8))
    with pytest.raises(MediaRefused, match="takes 2 seconds; at most 1"):
        open_clip(FILES["MP4"], MediaLimits(max_video_seconds=1))
    with pytest.raises(MediaRefused, match="has 101 bytes; at most 100"):
        open_clip(bytes(101), MediaLimits(max_image_bytes=100))
    for name in FILES:
        with pytest.raises(MediaRefused, match="takes more than -1 seconds to decode"):
            list(open_clip(FILES[name], MediaLimits(decode_seconds=-1.0)).unpack([0]))
    for chosen in ([still, still], ([still, still], 25)):
        with pytest.raises(MediaRefused, match="takes more than -1 seconds to decode"):
            check_clip(chosen, MediaLimits(decode_seconds=-1.0))
    wide = drawn("GIF", plain([0, 9], 5_000, 2_001))
    with pytest.raises(MediaRefused, match="5000 x 2001 pixels; at most 10000000 pixels in all"):
        open_clip(wide, LIMITS)


def claiming(count: int) -> bytes:
    """Return an MP4 file that claims `count` samples of one size."""
    head, table, rest = FILES["MP4"].partition(b"stsz")
    return head + table + bytes(4) + (1).to_bytes(4, "big") + count.to_bytes(4, "big") + rest[12:]


DAMAGED: dict[str, bytes] = {
    "nothing": b"",
    "text": b"not a video at all",
    "cut off in its head": FILES["MP4"][:60],
    "of a kind that is not read": film("avi"),
    "of a codec that is not read": film("mp4", "mjpeg"),
    "a list of files": b"#EXTM3U\n/etc/passwd\n",
    "a script that names files": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "of more samples than any film has": claiming(2_000_001),
    "with its tables packed": FILES["MP4"].replace(b"stsz", b"cmov"),
    "noise behind a good beginning": b"\x1a\x45\xdf\xa3" + bytes(range(200)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_without_a_word_of_the_library(name: str) -> None:
    with pytest.raises(MediaRefused) as caught:
        list(open_clip(DAMAGED[name], LIMITS, "here").unpack([0]))
    assert str(caught.value) == "here cannot be read: it is damaged, or no MP4, WebM, GIF or WebP"
    assert caught.value.__suppress_context__


def test_changed_headers_are_read_or_refused() -> None:
    def read(data: bytes) -> None:
        clip = open_clip(data, LIMITS)
        for frame in clip.unpack([0, clip.count - 1][: clip.count]):
            assert frame.width * frame.height <= 10_000_000

    check_changed_headers(list(FILES.values()), read)


def test_without_its_library_drawn_ones_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert open_clip(FILES["GIF"], LIMITS).count == 8
    with pytest.raises(UnsupportedFeature, match=r"pip install 'bridle-llm\[video\]'"):
        open_clip(FILES["MP4"], LIMITS)


def test_shapes_of_parts() -> None:
    data = base64.b64encode(FILES["MP4"]).decode()
    shapes: list[dict[str, Any]] = [
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
        {"type": "video_url", "video_url": f"data:video/mp4;base64,{data}"},
        {"type": "video", "video": FILES["MP4"]},
    ]
    for shape in shapes:
        found = source_of(shape, "here")
        assert found is not None and found.modality == "video" and found.open(LIMITS) == FILES["MP4"]
    jpeg = base64.b64encode(b"one").decode()
    assert Source(f"data:video/jpeg;base64,{jpeg},{jpeg}", "here", modality="video").open(LIMITS) == [b"one"] * 2
    with pytest.raises(MediaRefused, match="has 241 frames; at most 240"):
        Source("data:video/jpeg;base64," + "," * 240, "here", modality="video").open(LIMITS)
    with pytest.raises(MediaRefused, match="must be one of video/mp4"):
        Source("data:video/avi;base64,AAAA", "here", modality="video").open(LIMITS)


def test_what_a_model_is_shown_has_a_bound(tmp_path: Path) -> None:
    limits = MediaLimits(max_videos=1, max_frames=4, max_video_pixels=4 * 16 * 16)
    reader = open_reader(vision_checkpoints.make_seeing("qwen2_vl", tmp_path), limits)
    assert reader is not None
    video = reader.read(FILES["MP4"], modality="video")
    assert reader.read(FILES["MP4"], modality="video") is video
    assert video.layout.grid is not None and video.layout.grid[0] == 2
    assert video.medium.num_rows <= 2 * 4
    reader.fit(6)
    assert reader.read(plain(GREYS[:4]), modality="video").medium.num_rows == 2  # two times, of the least size
    other = open_reader(vision_checkpoints.make_seeing("llava_onevision", tmp_path / "tiles"), limits)
    assert other is not None
    other.limits = MediaLimits(max_video_pixels=4 * 128 - 1)
    with pytest.raises(MediaRefused, match="has 1024 pixels after resizing for this model; at most 1022"):
        other.read(plain(GREYS[:4]), modality="video")
    with pytest.raises(MediaRefused, match="2 videos were sent; at most 1"):
        reader.read_all([Source(FILES["MP4"], "a", modality="video")] * 2)
