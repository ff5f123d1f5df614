"""Decodes untrusted sound files. Only listed formats are tried. Length and sampling rate are checked in the header
before anything is decoded. Error messages of libraries are not passed on. The decoded sound has one channel, the mean
of all channels, at the model's sampling rate. A file is decoded and resampled piece by piece, so that memory for
decoding does not grow with the file's length.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridle.distribution import install_hint
from bridle.errors import MediaRefused, UnsupportedFeature
from bridle.multimodal.limits import LEAST_RATE, MOST_CHANNELS, MOST_RATE, MediaLimits, UnpackTimer

Samples = NDArray[np.float32]
#: Samples that are decoded at a time.
_PIECE = 1 << 18
#: Maximum of a sample. Samples of common files are between -1 and 1. Powers of larger ones up to this number are still
#: finite.
_LOUDEST = 65_536
_NEEDS = f"needs `{install_hint('audio')}`"


def open_sound(data: bytes, rate: int, limits: MediaLimits, where: str = "audio") -> Samples:
    """Decode the sound in a file, at `rate` samples per second. Raises `MediaRefused` with bridle's own message."""
    if len(data) > limits.max_image_bytes:
        raise MediaRefused(f"{where} has {len(data)} bytes; at most {limits.max_image_bytes}", where)
    try:
        import soundfile
    except ImportError:
        raise UnsupportedFeature(f"{where} is a sound file; to read it, bridle {_NEEDS}", where) from None
    try:
        if not _is_known(data):
            raise ValueError
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check(file.samplerate, file.channels, file.frames, limits, where)
            return _at_rate(_pieces(file, UnpackTimer(limits, where)), file.samplerate, rate, limits, where)
    except (MediaRefused, UnsupportedFeature):
        raise
    except Exception:  # any error of a decoder; its message is not for clients
        raise MediaRefused(f"{where} cannot be read: it is damaged, or not WAV, MP3, FLAC or Ogg", where) from None


def check_sound(value: Any, rate: int, limits: MediaLimits, where: str = "audio") -> Samples:
    """Convert samples that a Python program passes. `value` is an array, by channels if it has two dimensions, or a
    pair of an array and its sampling rate. If no sampling rate is given, the samples are taken to have the model's
    `rate`."""
    own, array = rate, value
    if isinstance(value, tuple) and len(value) == 2:
        array, own = value
    if not isinstance(array, np.ndarray) or array.ndim not in (1, 2) or not isinstance(own, (int, float)):
        raise MediaRefused(
            f"{where} is {type(value).__name__}; must be bytes, a path, an array, or an array with its rate", where
        )
    samples = array if array.ndim == 1 else array.mean(axis=int(np.argmin(array.shape)))
    if array.dtype.kind in "iu":
        samples = samples / (1 << (8 * array.dtype.itemsize - 1))
    _check(round(own), 1, len(samples), limits, where)
    pieces = (samples[start : start + _PIECE].astype(np.float32) for start in range(0, len(samples), _PIECE))
    return _at_rate(pieces, round(own), rate, limits, where)


def _is_known(data: bytes) -> bool:
    """Return whether a file has the header of a supported format. The decoder alone would try many more formats."""
    is_mp3 = data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")
    return is_mp3 or data[:4] in (b"fLaC", b"OggS") or (data[:4] == b"RIFF" and data[8:12] == b"WAVE")


def _check(rate: int, num_channels: int, num_samples: int, limits: MediaLimits, where: str) -> None:
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise MediaRefused(f"{where} has a sampling rate of {rate} Hz; must be {LEAST_RATE} to {MOST_RATE}", where)
    if not 1 <= num_channels <= MOST_CHANNELS:
        raise MediaRefused(f"{where} has {num_channels} channels; at most {MOST_CHANNELS}", where)
    if num_samples > limits.max_sound_seconds * rate:
        seconds = num_samples / rate
        raise MediaRefused(f"{where} takes {seconds:.0f} seconds; at most {limits.max_sound_seconds:g}", where)


def _pieces(file: Any, clock: UnpackTimer) -> Iterator[Samples]:
    while len(piece := file.read(_PIECE // file.channels, dtype="float32", always_2d=True)):
        clock.check()
        yield piece.mean(axis=1)


def _at_rate(pieces: Iterator[Samples], own: int, rate: int, limits: MediaLimits, where: str) -> Samples:
    """Resample all pieces to `rate`, and return them as one array. Samples are counted during decoding, because a file
    may have more samples than its header states."""
    convert = _converter(own, rate, where)
    found: list[Samples] = []
    num_samples = 0
    for piece in pieces:
        num_samples += len(piece)
        _check(own, 1, num_samples, limits, where)
        found.append(convert(piece, False))
    found.append(convert(np.zeros(0, np.float32), True))
    samples = np.concatenate(found)
    if not num_samples or not len(samples):
        raise MediaRefused(f"{where} is empty", where)
    if not np.abs(samples).max() <= _LOUDEST:  # also true for NaN
        raise MediaRefused(f"{where} has samples larger than {_LOUDEST}, or not finite", where)
    return samples


def _converter(own: int, rate: int, where: str) -> Any:
    """Return an object that resamples the pieces of a sound, one after the other."""
    if own == rate:
        return lambda piece, is_last: piece
    try:
        import soxr
    except ImportError:
        raise UnsupportedFeature(
            f"{where} has {own} samples a second, but the model needs {rate}; to convert it, bridle {_NEEDS}", where
        ) from None
    return soxr.ResampleStream(own, rate, 1, dtype="float32").resample_chunk
