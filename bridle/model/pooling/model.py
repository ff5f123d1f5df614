"""Runs an encoder on many texts at once, packed without padding, and returns one vector for each text. This module is
independent of plans and the engine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bridle.errors import UnsupportedModel
from bridle.model.forward_context import attention_handler
from bridle.model.pooling.heads import Head
from bridle.model.pooling.segments import SegmentAttention, Segments


class PooledModel:
    """An encoder `base` of transformers with bridle's attention, and a `head` that computes vectors from its hidden
    states.

    In the second text of a pair, a token is given as its id plus `num_ids`. `size` is the length of the vectors.
    """

    def __init__(self, base: Any, head: Head, size: int, num_types: int, device: torch.device) -> None:
        self.base, self.head, self.size = base, head, size
        self.device = device
        self.num_ids = int(base.get_input_embeddings().num_embeddings)
        self.num_types = num_types
        self.position_offset = _position_offset(base)
        taken = inspect.signature(base.forward).parameters
        if "position_ids" not in taken:
            raise UnsupportedModel(f"{type(base).__name__} takes no position ids, so texts cannot be packed")
        self._has_types = "token_type_ids" in taken
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in taken else {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights."""
        return sum(parameter.nbytes for parameter in self.base.parameters())

    def run(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors of these texts, [N, size] in float32. No text may be empty."""
        segments = Segments([len(text) for text in texts])
        with torch.inference_mode():
            rows = self.hidden(texts, segments)
            return segments.restored(self.head(rows, segments).float())

    def hidden(self, texts: Sequence[Sequence[int]], segments: Segments) -> Tensor:
        """Return the last layer's hidden states of all tokens, [T, hidden], in the order of `segments`."""
        packed = torch.tensor([token for number in segments.order for token in texts[number]])  # [T]
        given: dict[str, Any] = dict(self._options)
        if self._has_types:
            given["token_type_ids"] = (packed // self.num_ids).unsqueeze(0).to(self.device)
        ids = (packed % self.num_ids).unsqueeze(0).to(self.device)
        positions = segments.positions(self.position_offset).unsqueeze(0).to(self.device)
        with torch.inference_mode(), attention_handler(SegmentAttention(segments)):
            out = self.base(input_ids=ids, position_ids=positions, **given)
        rows: Tensor = out.last_hidden_state[0]
        return rows


def _position_offset(base: Any) -> int:
    """Return the position id of a text's first token. In RoBERTa, MPNet and related models, the first position id is
    the padding token's id plus 1."""
    embeddings: Any = getattr(base, "embeddings", None)
    if not hasattr(embeddings, "create_position_ids_from_inputs_embeds"):
        return 0
    return int(embeddings.padding_idx) + 1
