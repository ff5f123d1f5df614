"""Tests that common, damaged and hostile audio files are decoded, or refused with bridle's own error."""

from __future__ import annotations

import base64
import io
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from bridle.errors import MediaRefused, UnsupportedFeature
from bridle.multimodal import MediaLimits, Source, open_reader, source_of
from bridle.multimodal.audio_decoding import check_sound, open_sound
from tests.fakes import audio_checkpoints
from tests.multimodal.hostile_files import check_changed_headers

LIMITS = MediaLimits()
RATE = 16_000


def tone(seconds: float = 0.5, rate: int = RATE, hertz: float = 440.0) -> np.ndarray[Any, Any]:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def saved(samples: np.ndarray[Any, Any], kind: str = "WAV", rate: int = RATE, **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **options)
    return file.getvalue()


def loudest(samples: np.ndarray[Any, Any], rate: int = RATE) -> float:
    """Return the strongest frequency of the samples, in Hz."""
    return float(np.argmax(np.abs(np.fft.rfft(samples)))) * rate / len(samples)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate", [16_000, 44_100, 8_000])
def test_common_files_are_read_at_the_models_rate(kind: str, rate: int) -> None:
    found = open_sound(saved(tone(rate=rate), kind, rate), RATE, LIMITS)
    assert found.dtype == np.float32 and found.ndim == 1
    assert abs(len(found) - 8_000) < 1_200  # MP3 begins and ends with silence
    assert abs(loudest(found) - 440) < 8


def test_channels_are_mixed() -> None:
    both = np.stack([tone(), -tone()], 1)
    assert np.abs(open_sound(saved(both), RATE, LIMITS)).max() < 1e-3
    assert np.allclose(check_sound(np.stack([tone(), tone()]), RATE, LIMITS), tone())
    assert np.allclose(check_sound((tone() * 32_767).astype(np.int16), RATE, LIMITS), tone(), atol=1e-4)
    assert abs(loudest(check_sound((tone(rate=48_000), 48_000), RATE, LIMITS)) - 440) < 8


def header_of_wav(rate: int = RATE, channels: int = 1, num_bytes: int = 0, actual: bytes = b"") -> bytes:
    """Return the header of an 8-bit WAV file that claims `num_bytes` bytes of samples."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * channels, channels, 8)
    head = form + struct.pack("<4sI", b"data", num_bytes)
    return b"RIFF" + struct.pack("<I", 4 + len(head) + len(actual)) + b"WAVE" + head + actual


CLAIMS = [
    (header_of_wav(num_bytes=RATE * 1_801, actual=bytes(RATE * 1_801)), "audio takes 1801 seconds; at most 1800"),
    (
        header_of_wav(rate=900, num_bytes=9, actual=bytes(9)),
        "audio has a sampling rate of 900 Hz; must be 1000 to 384000",
    ),
    (header_of_wav(channels=17, num_bytes=34, actual=bytes(34)), "audio has 17 channels; at most 16"),
    (saved(np.full(9, np.nan, np.float32), subtype="FLOAT"), "audio has samples larger than 65536, or not finite"),
    (saved(np.zeros(0, np.float32)), "audio is empty"),
]


@pytest.mark.parametrize(("data", "why"), CLAIMS)
def test_what_is_too_long_or_odd_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(MediaRefused) as caught:
        open_sound(data, RATE, MediaLimits(max_image_bytes=64 << 20))
    assert str(caught.value) == why


DAMAGED: dict[str, bytes] = {
    "nothing": b"",
    "text": b"not a sound at all",
    "cut off in its head": saved(tone())[:20],
    "of a kind that is not read": saved(tone(), "AIFF"),
    "a list of files": b"#EXTM3U\n/etc/passwd\n",
    "noise behind a good beginning": b"OggS" + bytes(range(200)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_without_a_word_of_the_library(name: str) -> None:
    with pytest.raises(MediaRefused) as caught:
        open_sound(DAMAGED[name], RATE, LIMITS, "messages[0].content[1]")
    assert str(caught.value) == "messages[0].content[1] cannot be read: it is damaged, or not WAV, MP3, FLAC or Ogg"
    assert caught.value.__suppress_context__


def test_changed_headers_are_read_or_refused() -> None:
    limits = MediaLimits(max_sound_seconds=60)

    def read(data: bytes) -> None:
        found = open_sound(data, RATE, limits)
        assert 0 < len(found) <= 61 * RATE and np.isfinite(found).all()

    check_changed_headers([saved(tone(0.1), kind) for kind in ("WAV", "FLAC", "OGG", "MP3")], read)


def test_a_file_has_a_time_to_be_unpacked() -> None:
    with pytest.raises(MediaRefused, match="audio takes more than -1 seconds to decode"):
        open_sound(saved(tone()), RATE, MediaLimits(decode_seconds=-1.0))


@pytest.mark.parametrize("value", ["x", [0.5, 0.5], np.zeros((2, 2, 2)), (tone(), "fast"), 5])
def test_other_objects_are_no_sounds(value: Any) -> None:
    with pytest.raises(MediaRefused, match="must be bytes, a path, an array, or an array with its rate"):
        check_sound(value, RATE, LIMITS)


def test_without_its_libraries_an_array_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "soxr", None)
    assert len(check_sound(tone(), RATE, LIMITS)) == 8_000
    for value, open_it in ((b"RIFF", open_sound), ((tone(), 8_000), check_sound)):
        with pytest.raises(UnsupportedFeature, match=r"pip install 'bridle-llm\[audio\]'"):
            open_it(value, RATE, LIMITS)  # type: ignore[operator]


def test_shapes_of_parts() -> None:
    data = base64.b64encode(saved(tone())).decode()
    wanted = saved(tone())
    shapes: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "audio_url", "audio_url": f"data:audio/x-wav;codecs=1;base64,{data}"},
        {"type": "audio", "audio": wanted},
    ]
    for shape in shapes:
        assert opened(shape) == wanted
    for wrong, why in [
        ({"data": data, "format": "exe"}, "is of type 'audio/exe'; must be one of audio/wav"),
        ({"data": 5, "format": "wav"}, "must have data in base64, and its format"),
        ({"data": "A A", "format": "wav"}, "not valid base64"),
        ({}, "has no sound"),
    ]:
        with pytest.raises(MediaRefused, match=why):
            opened({"type": "input_audio", "input_audio": wrong})


def opened(part: dict[str, Any]) -> Any:
    found = source_of(part, "here")
    assert found is not None
    return found.open(LIMITS)


def test_so_many_sounds_go_into_a_request(tmp_path: Path) -> None:
    reader = open_reader(audio_checkpoints.make_hearing(tmp_path))
    assert reader is not None
    wav = saved(tone())
    assert reader.read(wav, modality="audio") is reader.read(wav, modality="audio")
    with pytest.raises(MediaRefused, match="17 sounds were sent; at most 16"):
        reader.read_all([Source(wav, "a", modality="audio")] * 17)
    with pytest.raises(UnsupportedFeature, match="a: this model reads no images"):
        reader.read(wav, "a")
