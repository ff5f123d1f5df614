"""Turns one picture, or one sound, into the rows that stand in a prompt in its place, by the model's own tower.

One picture is encoded per call: what it becomes must not depend on others. Knows nothing of requests or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bridle.engine.media import PROMPT_IDS, MediaArray, Medium
from bridle.errors import MediaRefused


@dataclass(frozen=True, slots=True)
class Features:
    """What a picture is to the language model: `rows` [N, hidden], and `further` [N, hidden] for each of its first
    layers that adds some."""

    rows: Tensor
    further: tuple[Tensor, ...] = ()


#: The methods of the library that encode what is no picture, by the array that only these have.
_METHODS = {"input_features": "get_audio_features", "pixel_values_videos": "get_video_features"}


class MediaEncoder:
    """The part of a model that reads pictures. `inner` is the library's model of images and text without its head."""

    def __init__(self, inner: Any, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._inner = inner
        self._dtype = dtype
        self._device = device
        deepstack = getattr(getattr(inner.config, "vision_config", None), "deepstack_visual_indexes", None)
        #: The memory that one row of features takes.
        self.row_bytes = hidden_size * dtype.itemsize * (1 + len(deepstack or ()))

    @property
    def is_on_cpu(self) -> bool:
        return self._device.type == "cpu"

    def encode(self, medium: Medium) -> Features:
        """The features of a picture, or of a prompt that sees all of itself. Raises `MediaRefused` if they are not as
        many as the prompt has places for."""
        with torch.inference_mode():
            if medium.arrays[0].name == PROMPT_IDS:
                return self._prompt(*medium.arrays)
            return self._picture(medium.arrays, medium.num_rows)

    def _picture(self, arrays: Sequence[MediaArray], num_rows: int) -> Features:
        inputs = {array.name: self._tensor(array) for array in arrays}
        method = next((_METHODS[name] for name in inputs if name in _METHODS), "get_image_features")
        output = getattr(self._inner, method)(**inputs, return_dict=True)
        rows = self._flat(output.pooler_output)
        further = tuple(self._flat(part) for part in getattr(output, "deepstack_features", None) or ())
        if rows.shape[0] != num_rows:
            raise MediaRefused(
                f"the model makes {rows.shape[0]} rows of this picture; the prompt has places for {num_rows}"
            )
        return Features(rows, further)

    def _prompt(self, ids: MediaArray, *pictures: MediaArray) -> Features:
        """What stands at each position of a prompt: the embedding of its token, or a row of a picture."""
        tokens = self._tensor(ids)  # [N]
        places = (tokens == self._inner.config.image_token_id).nonzero()[:, 0]
        num_rows = len(places) // max(len(pictures), 1)
        seen = [self._picture((each,), num_rows).rows for each in pictures]
        rows: Tensor = self._inner.get_input_embeddings()(tokens).to(self._dtype)
        return Features(rows.index_copy(0, places, torch.cat(seen)))

    def _tensor(self, array: MediaArray) -> Tensor:
        numbers = torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())
        return numbers.to(self._device, self._dtype if numbers.is_floating_point() else numbers.dtype)

    def _flat(self, parts: Any) -> Tensor:
        """A tensor or several, with any number of dimensions -> [N, hidden]"""
        several = [parts] if isinstance(parts, Tensor) else list(parts)
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in several]).to(self._dtype)
