"""Encodes images and sounds by the model's tower: one feature row for each placeholder token of the prompt. Images of
one shape may be encoded together. Features that were encoded together differ only by rounding from features that were
encoded alone. This module is independent of requests and steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bridle.engine.multimodal.multimodal_inputs import PROMPT_IDS, ROW_TOKENS, MediaArray, MultiModalItem
from bridle.errors import MediaRefused
from bridle.model.image_feature_cache import PictureRows


@dataclass(frozen=True, slots=True)
class Features:
    """Features of an image for the language model. `rows` [N, hidden] replace embedding rows. `further` has features
    [N, hidden] for each of the first layers that adds image features to its output (DeepStack)."""

    rows: Tensor
    further: tuple[Tensor, ...] = ()


#: The methods of transformers that encode sound and video, by the name of the input array that only they have.
_METHODS = {"input_features": "get_audio_features", "pixel_values_videos": "get_video_features"}


def alike(one: MultiModalItem, other: MultiModalItem) -> bool:
    """Return whether two media are images that can be encoded together."""
    if one.num_rows != other.num_rows or len(one.arrays) != len(other.arrays):
        return False
    pairs = zip(one.arrays, other.arrays, strict=True)
    return all(
        (a.name, a.dtype, a.shape) == (b.name, b.dtype, b.shape) and a.name != PROMPT_IDS and a.name not in _METHODS
        for a, b in pairs
    )


class MediaEncoder:
    """Encodes media by the towers of `inner`, the multimodal model of transformers without its output head."""

    def __init__(self, inner: Any, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._inner = inner
        self._dtype = dtype
        self._device = device
        #: True if `encode` takes whole prompts, each with its images.
        self.takes_prompts = getattr(inner.config, "model_type", "") == "paligemma"
        #: The rows of images of earlier prompts. The cache has no memory until its `max_bytes` is set.
        self.known = PictureRows(0)
        deepstack = getattr(getattr(inner.config, "vision_config", None), "deepstack_visual_indexes", None)
        #: Bytes of one row of features.
        self.row_bytes = hidden_size * dtype.itemsize * (1 + len(deepstack or ()))

    @property
    def is_on_cpu(self) -> bool:
        return self._device.type == "cpu"

    def encode(self, medium: MultiModalItem) -> Features:
        """Return the features of one medium: an image or a sound, or a whole prompt with images. Whole prompts are
        encoded for models in which all tokens of a prompt with images attend to each other. Raises `MediaRefused` if
        the number of feature rows differs from the number of placeholders."""
        with torch.inference_mode():
            if medium.arrays[0].name == PROMPT_IDS:
                return self._prompt(medium)
            return self._picture(medium.arrays, medium.num_rows)

    def encode_all(self, media: Sequence[MultiModalItem]) -> list[Features]:
        """Return the features of several images of one shape (see `alike`), from a single call of the tower."""
        with torch.inference_mode():
            return self._pictures([medium.arrays for medium in media], media[0].num_rows)

    def _picture(self, arrays: Sequence[MediaArray], num_rows: int) -> Features:
        (features,) = self._pictures([arrays], num_rows)
        return features

    def _pictures(self, several: Sequence[Sequence[MediaArray]], num_rows: int) -> list[Features]:
        """Return the features of images whose arrays have the same names and shapes. Each image has `num_rows` rows."""
        inputs = {each[0].name: _joined([self._tensor(array) for array in each]) for each in zip(*several, strict=True)}
        tokens = inputs.pop(ROW_TOKENS, None)
        method = next((_METHODS[name] for name in inputs if name in _METHODS), "get_image_features")
        output = getattr(self._inner, method)(**inputs, return_dict=True)
        rows = self._flat(output.pooler_output)
        if tokens is not None:
            rows = self._with_markers(rows, tokens, output.visual_indicator_features)
        further = tuple(self._flat(part) for part in getattr(output, "deepstack_features", None) or ())
        if rows.shape[0] != num_rows * len(several):
            raise MediaRefused(
                f"the model computes {rows.shape[0] / len(several):g} embeddings of this image; the prompt has "
                f"{num_rows} placeholder tokens"
            )
        if len(several) == 1:
            return [Features(rows, further)]
        # Copies, because a view of a part would keep the whole tensor in memory.
        parts = zip(*(torch.split(part, num_rows) for part in (rows, *further)), strict=True)
        return [Features(own.clone(), tuple(part.clone() for part in more)) for own, *more in parts]

    def _with_markers(self, rows: Tensor, tokens: Tensor, markers: Tensor) -> Tensor:
        """Return one row [hidden] for each of `tokens`: the next of `rows` for an image token, and the embedding in
        `markers` for a marker token."""
        is_row = tokens == self._inner.config.image_token_id
        if int(is_row.sum()) != len(rows):
            return rows
        placed = rows.new_empty(len(tokens), rows.shape[1])
        placed[is_row] = rows
        for token, marker in zip(self._inner.config.visual_indicator_token_ids, markers, strict=True):
            placed[tokens == token] = marker.to(rows.dtype)
        return placed

    def _prompt(self, medium: MultiModalItem) -> Features:
        """Return the features of a whole prompt: for each position, a feature row of an image, or the embedding of the
        position's token."""
        ids, *pictures = medium.arrays
        tokens = self._tensor(ids)  # [N]
        places = (tokens == self._inner.config.image_token_id).nonzero()[:, 0]
        num_rows = len(places) // max(len(pictures), 1)
        keys = medium.pictures or (None,) * len(pictures)
        seen = [self._rows_of(key, each, num_rows) for key, each in zip(keys, pictures, strict=True)]
        rows: Tensor = self._inner.get_input_embeddings()(tokens).to(self._dtype)
        return Features(rows.index_copy(0, places, torch.cat(seen)))

    def _rows_of(self, key: bytes | None, picture: MediaArray, num_rows: int) -> Tensor:
        """Return the feature rows of one image in a prompt. If an earlier prompt had an image with this key, the
        feature rows come from the cache."""
        rows = None if key is None else self.known.find(key)
        if rows is None or len(rows) != num_rows:
            rows = self._picture((picture,), num_rows).rows
            if key is not None:
                self.known.keep(key, rows)
        return rows

    def _tensor(self, array: MediaArray) -> Tensor:
        numbers = torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())
        return numbers.to(self._device, self._dtype if numbers.is_floating_point() else numbers.dtype)

    def _flat(self, parts: Any) -> Tensor:
        """Flatten one or several tensors, with any number of dimensions, to [N, hidden]."""
        several = [parts] if isinstance(parts, Tensor) else list(parts)
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in several]).to(self._dtype)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
