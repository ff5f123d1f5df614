"""Reads images. The checkpoint's image processor computes the arrays for the tower, and the rule of the model family
determines the placeholder's layout."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridle.engine.multimodal.multimodal_inputs import ROW_TOKENS
from bridle.errors import MediaRefused, UnsupportedFeature
from bridle.multimodal.families import Arrays, MultiModalFamily, PlaceholderLayout
from bridle.multimodal.image_decoding import check_picture, open_picture
from bridle.multimodal.limits import MediaLimits
from bridle.multimodal.modalities import IMAGE
from bridle.multimodal.processor import quiet, token_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig


class ImageProcessor:
    """Implements `bridle.multimodal.processor.ModalityProcessor` for images."""

    modality = IMAGE

    def __init__(self, folder: Path, settings: PreTrainedConfig, family: MultiModalFamily) -> None:
        self._folder, self._config, self._family = folder, settings.to_dict(), family
        self._processor: Any = None
        self._lock = threading.Lock()  # processors are not thread-safe
        self.placeholder = token_of(settings, family.placeholder, IMAGE)
        self.row_token = token_of(settings, "image_token_id", IMAGE)
        self.written, self.is_whole = family.written, family.is_whole
        sees = getattr(settings.get_text_config(), "use_bidirectional_attention", None)
        self.is_mutual = family.is_mutual is True or (bool(family.is_mutual) and family.is_mutual == sees)

    def read(self, file: Any, limits: MediaLimits, where: str) -> tuple[Arrays, PlaceholderLayout]:
        """Return the arrays and the placeholder layout of an image. `file` is the bytes of a file, a Pillow image or an
        array."""
        is_file = isinstance(file, bytes)
        return self._prepare(
            open_picture(file, limits, where) if is_file else check_picture(file, limits, where), where
        )

    def _prepare(self, image: Image, where: str) -> tuple[Arrays, PlaceholderLayout]:
        try:
            with self._lock:
                results = self.processor()(images=[image], return_tensors="np", **(self._family.options or {}))
            layout = self._family.lay_out(self._config, results)
        except UnsupportedFeature:
            raise
        except Exception:  # an error of transformers, whose message may quote the image
            raise MediaRefused(f"{where} has a size that this model's image processor refuses", where) from None
        arrays = {name: np.asarray(results[name]) for name in self._family.arrays if results.get(name) is not None}
        if layout.tokens:
            arrays[ROW_TOKENS] = np.asarray(layout.tokens, np.int64)
        return arrays, layout

    def processor(self) -> Any:
        """Return the checkpoint's image processor, in the variant that needs only Pillow and numpy."""
        if self._processor is None:
            with quiet():
                # At the package's top, older releases claim to need torchvision for this class. The Pillow form does
                # not need it.
                from transformers.models.auto.image_processing_auto import AutoImageProcessor

                try:
                    self._processor = AutoImageProcessor.from_pretrained(
                        self._folder, backend="pil", local_files_only=True, trust_remote_code=False
                    )
                except Exception as error:
                    missing = "torchvision" in str(error)
                    needs = " (transformers needs torchvision for it: install the build for this torch)" * missing
                    raise UnsupportedFeature(
                        f"the checkpoint's image processor cannot be used: {type(error).__name__}{needs}", "image"
                    ) from error
        return self._processor
