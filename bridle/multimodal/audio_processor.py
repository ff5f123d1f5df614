"""Converts sounds to mel spectra, in pieces of the length that a model's audio tower accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from bridle.multimodal.audio_decoding import Samples, check_sound, open_sound
from bridle.multimodal.families import Arrays, Config, PlaceholderLayout
from bridle.multimodal.limits import MediaLimits
from bridle.multimodal.modalities import AUDIO
from bridle.multimodal.processor import read_settings, token_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FILES = (("preprocessor_config.json", ""), ("processor_config.json", "feature_extractor"))
#: Spectra that are computed at once.
_BLOCK = 4_096


@dataclass(frozen=True, slots=True)
class AudioSettings:
    """Settings of a model family's audio input. `piece` returns the number of spectra that the tower accepts at a time.
    `lay_out` returns the layout of a placeholder for a sound of some number of pieces."""

    piece: Callable[[Config], int]
    lay_out: Callable[[Config, int], PlaceholderLayout]


def _voxtral_piece(config: Config) -> int:
    return 2 * int(config["audio_config"]["max_source_positions"])


def _voxtral(config: Config, num_pieces: int) -> PlaceholderLayout:
    tower = config["audio_config"]
    rows = int(tower["max_source_positions"]) * int(tower["hidden_size"]) // int(tower["intermediate_size"])
    return PlaceholderLayout(("[BEGIN_AUDIO]", num_pieces * rows), around=("[BEGIN_AUDIO]", ""))


#: Families whose sounds are read.
HEARING: Mapping[str, AudioSettings] = {"voxtral": AudioSettings(_voxtral_piece, _voxtral)}


class AudioProcessor:
    """Implements `bridle.multimodal.processor.ModalityProcessor` for sounds."""

    modality, written, is_mutual, is_whole = AUDIO, "", False, False

    def __init__(self, folder: Path, settings: PreTrainedConfig, family: AudioSettings) -> None:
        self._folder, self._config, self._family = folder, settings.to_dict(), family
        self._mel: Mel | None = None
        self.placeholder = self.row_token = token_of(settings, "audio_token_id", AUDIO)

    def read(self, file: Any, limits: MediaLimits, where: str) -> tuple[Arrays, PlaceholderLayout]:
        """Read a sound: the bytes of a file, an array, or an array with its sampling rate."""
        if self._mel is None:
            self._mel = Mel.of(read_settings(self._folder, _FILES, AUDIO))
        open_it = open_sound if isinstance(file, bytes) else check_sound
        samples = open_it(file, self._mel.rate, limits, where)
        length = self._family.piece(self._config)
        num_pieces = -(-len(samples) // (length * self._mel.hop))
        spectra = self._mel.spectra(samples, num_pieces * length)
        pieces = spectra.reshape(-1, num_pieces, length).transpose(1, 0, 2)
        return {"input_features": np.ascontiguousarray(pieces)}, self._family.lay_out(self._config, num_pieces)


@dataclass(frozen=True, slots=True)
class Mel:
    """Computes Whisper's spectra: every `hop` samples, the logarithm of the power of `size` samples in each band of the
    mel scale."""

    rate: int
    hop: int
    size: int
    filters: NDArray[np.float32]  # [size / 2 + 1, bands]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Mel:
        """Return the settings of a checkpoint; missing settings have Whisper's values."""
        from transformers.audio_utils import mel_filter_bank

        rate, size = int(settings.get("sampling_rate", 16_000)), int(settings.get("n_fft", 400))
        filters = mel_filter_bank(
            num_frequency_bins=1 + size // 2,
            num_mel_filters=int(settings.get("feature_size", 80)),
            min_frequency=0.0,
            max_frequency=8_000.0,
            sampling_rate=rate,
            norm="slaney",
            mel_scale="slaney",
        )
        return cls(rate, int(settings.get("hop_length", 160)), size, np.asarray(filters, np.float32))

    def spectra(self, samples: Samples, count: int) -> NDArray[np.float32]:
        """Return spectra [bands, count] of samples, padded with silence. Values far below the loudest value are raised
        to a minimum."""
        padded = np.pad(samples, (0, count * self.hop - len(samples)))
        padded = np.pad(padded, self.size // 2, mode="reflect")
        frames = sliding_window_view(padded, self.size)[:: self.hop][:count]
        window = np.hanning(self.size + 1)[:-1].astype(np.float32)
        found = np.empty((self.filters.shape[1], count), np.float32)
        for start in range(0, count, _BLOCK):
            power = np.abs(np.fft.rfft(frames[start : start + _BLOCK] * window)) ** 2
            found[:, start : start + _BLOCK] = (power.astype(np.float32) @ self.filters).T
        found = np.log10(np.maximum(found, np.float32(1e-10)))
        loud: NDArray[np.float32] = np.maximum(found, found.max() - np.float32(8))
        return (loud + np.float32(4)) / np.float32(4)
