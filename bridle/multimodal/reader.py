"""Converts images, sounds and videos of a request to the engine's inputs: `MultiModalItem` and `PlaceholderRange`. A
reader belongs to one model. A reader has a processor for each modality that the model reads. The processor computes the
arrays of a file and the layout of its placeholder. Recently read files are cached by a digest of their bytes, because a
chat sends the same files in each turn. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridle.engine.multimodal.multimodal_inputs import MediaArray, MultiModalInputs, MultiModalItem
from bridle.errors import MediaRefused, UnsupportedFeature
from bridle.multimodal.audio_processor import HEARING, AudioProcessor
from bridle.multimodal.families import FAMILIES
from bridle.multimodal.image_processor import ImageProcessor
from bridle.multimodal.limits import MediaLimits
from bridle.multimodal.media_fetcher import ImageHosts
from bridle.multimodal.modalities import AUDIO, IMAGE, VIDEO, WORDS, counted
from bridle.multimodal.placeholders import Picture, PlaceholderExpander
from bridle.multimodal.processor import ModalityProcessor, PlacingTokenizer, key_of, quiet
from bridle.multimodal.sources import NO_HOSTS, Source
from bridle.multimodal.video_processor import WATCHING, VideoProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Maximum bytes of arrays that a reader caches.
KEPT_BYTES = 256 << 20
#: Maximum pixels of an image that is requested in low detail.
LOW_PIXELS = 512 * 512


class MediaReader:
    """Reads files for the checkpoint in `folder`, whose configuration is `settings`. `hosts` fetches files that are
    given as a URL. `senses` has the processor of each modality that the model reads."""

    def __init__(
        self, folder: Path, settings: PreTrainedConfig, limits: MediaLimits | None = None, hosts: ImageHosts = NO_HOSTS
    ) -> None:
        self.folder, self.limits, self.hosts = folder, limits or MediaLimits(), hosts
        self.senses: Mapping[str, ModalityProcessor] = _senses_of(folder, settings)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()

    @property
    def placeholder(self) -> int:
        """Return the id of the placeholder token for an image in a prompt."""
        return self.senses[IMAGE].placeholder

    def fit(self, num_tokens: int) -> None:
        """Limit the rows of a video to half of the context length `num_tokens`."""
        rows = max(min(self.limits.max_video_rows, num_tokens // 2), 1)
        self.limits = replace(self.limits, max_video_rows=rows)

    # -- reading -------------------------------------------------------------------------------------------------

    def read_all(self, sources: Sequence[Source]) -> list[Picture]:
        """Read and process all files of a request, within its limits. Slow. Raises `MediaRefused` and
        `UnsupportedFeature`."""
        limits = self.limits
        most = {IMAGE: limits.max_images, AUDIO: limits.max_sounds, VIDEO: limits.max_videos}
        for modality, count in Counter(source.modality for source in sources).items():
            if count > most[modality]:
                raise MediaRefused(f"{counted(count, modality)} were sent; at most {most[modality]}", modality)
        files = self._open_all(sources)
        pictures: list[Picture] = []
        for file, source in zip(files, sources, strict=True):
            low = LOW_PIXELS if source.is_low else None
            pictures.append(self.read(file, source.where, low, source.modality))
            made = sum(picture.medium.num_bytes for picture in pictures)
            if made > limits.max_array_bytes:
                raise MediaRefused(
                    f"the decoded {WORDS[source.modality][1]} have {made} bytes; at most {limits.max_array_bytes}",
                    source.where,
                )
        return pictures

    def _open_all(self, sources: Sequence[Source]) -> list[Any]:
        """Return the bytes of each file of a request, or the object that a Python program passed instead."""
        limits, deadline = self.limits, time.monotonic() + self.limits.fetch_seconds
        files: list[Any] = []
        num_bytes = 0
        for source in sources:
            file = source.open(limits, self.hosts, deadline)
            num_bytes += sum(len(part) for part in _parts(file) if isinstance(part, bytes))
            if num_bytes > limits.max_total_bytes:
                what = WORDS[source.modality][1]
                raise MediaRefused(
                    f"the {what} have {num_bytes} bytes; at most {limits.max_total_bytes}", source.modality
                )
            files.append(file)
        return files

    def read(
        self, file: Any, where: str = "image", max_shown_pixels: int | None = None, modality: str = IMAGE
    ) -> Picture:
        """Read and process one file of a modality. `file` is bytes or an object that a Python program passes. Raises
        `MediaRefused`, and `UnsupportedFeature` if the model does not read this modality."""
        limits, sense = self.limits, self.senses.get(modality)
        if sense is None:
            raise UnsupportedFeature(f"{where}: this model reads no {WORDS[modality][1]}", where)
        if max_shown_pixels is not None:
            limits = replace(limits, max_shown_pixels=min(max_shown_pixels, limits.max_shown_pixels))
        if not isinstance(file, bytes):
            return self._prepare(sense, file, limits, where)
        salt = limits.max_shown_pixels.to_bytes(8, "little")
        digest = blake2b(file, digest_size=16, salt=salt, person=modality.encode()).digest()
        with self._lock:
            if (known := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                return known
        picture = self._prepare(sense, file, limits, where)
        self._keep(digest, picture)
        return picture

    def _prepare(self, sense: ModalityProcessor, file: Any, limits: MediaLimits, where: str) -> Picture:
        found, layout = sense.read(file, limits, where)
        arrays = tuple(
            MediaArray(name, str(value.dtype), tuple(value.shape), np.ascontiguousarray(value).tobytes())
            for name, value in found.items()
        )
        return Picture(MultiModalItem(key_of(arrays), arrays, layout.num_rows), layout, sense.modality)

    def _keep(self, digest: bytes, picture: Picture) -> None:
        with self._lock:
            self._kept[digest] = picture
            used = sum(each.medium.num_bytes for each in self._kept.values())
            while used > KEPT_BYTES:
                used -= self._kept.popitem(last=False)[1].medium.num_bytes

    # -- placing -------------------------------------------------------------------------------------------------

    def place(
        self, prompt: Sequence[int], pictures: Sequence[Picture], tokenizer: PlacingTokenizer
    ) -> tuple[tuple[int, ...], MultiModalInputs]:
        """Return the tokens of the prompt with each placeholder expanded, and the images with their positions. Raises
        `InvalidRequest` unless each image has exactly one placeholder."""
        return PlaceholderExpander(self.senses, tokenizer).place(prompt, pictures)


def _parts(file: Any) -> Sequence[Any]:
    """Return the list of frames of a video that is given as a list of files; return any other file in a list."""
    return file if isinstance(file, list) else [file]


def _senses_of(folder: Path, settings: PreTrainedConfig) -> dict[str, ModalityProcessor]:
    kind = settings.model_type
    senses: dict[str, ModalityProcessor] = {}
    if kind in FAMILIES:
        senses[IMAGE] = ImageProcessor(folder, settings, FAMILIES[kind])
    if kind in HEARING:
        senses[AUDIO] = AudioProcessor(folder, settings, HEARING[kind])
    if kind in WATCHING:
        with contextlib.suppress(UnsupportedFeature):  # it reads pictures, even if it cannot say where a video is
            senses[VIDEO] = VideoProcessor(folder, settings, WATCHING[kind])
    return senses


def open_reader(folder: Path, limits: MediaLimits | None = None, hosts: ImageHosts = NO_HOSTS) -> MediaReader | None:
    """Return a reader for the checkpoint in `folder`; None if its model reads only text, or if bridle does not support
    how the model reads media."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None  # a file of another kind; the model's loader reports the problem of a folder
    if kind not in FAMILIES and kind not in HEARING:
        return None
    with quiet():
        from transformers import AutoConfig

        settings = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if kind in FAMILIES and settings.vision_config is None:
        return None  # the text part of a model that reads images
    return MediaReader(folder, settings, limits, hosts)
