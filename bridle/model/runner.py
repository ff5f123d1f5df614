"""Runs a loaded model over one packed step. Knows tensors and the model, nothing of plans, mirrors or sampling."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from bridle.model.attention import PagedAttention
from bridle.model.dense_model import try_lower_model
from bridle.model.forward_context import attention_handler
from bridle.model.hidden import HeadInput
from bridle.model.packing import PackedStep
from bridle.model.text_part import TextPart


class ModelRunner:
    """A model of the library with its paged attention; one call per step."""

    def __init__(self, model: nn.Module, attention: PagedAttention) -> None:
        self.model = model
        self.attention = attention
        self._short = try_lower_model(model)
        # A few model classes compute the logits of all positions; then the wanted rows are picked afterwards.
        self._can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._head_input = HeadInput(model)
        self.hidden: Tensor | None = None  # [R, hidden] the last step's inputs of the head, if known

    @property
    def embedding_size(self) -> int:
        """The length of a row of `hidden`; 0 if hidden states are never known."""
        return self._head_input.size

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, in whatever orders layers keep them, and of the KV cache."""
        sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in _tensors(self.model)}
        return sum(sizes.values()) + self.attention.cache.num_bytes

    def run(self, step: PackedStep) -> Tensor:
        """Write the step's keys and values into the cache; returns the logits [R, V] of its logits rows."""
        attention = self.attention
        attention.step = step
        attention.kernel.begin(step)
        with torch.inference_mode():
            if self._short is not None:
                logits = self._short(step.input_ids, step.position_ids, step.logits_rows, attention)
                self.hidden = self._short.hidden
                return logits
            with attention_handler(attention):
                logits = self._call(step)
            self.hidden = self._head_input.rows(step.logits_rows)
            return logits

    def _call(self, step: PackedStep) -> Tensor:
        if not self._can_keep:
            logits: Tensor = self.model(
                input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False
            ).logits
            return logits[0].index_select(0, step.logits_rows)
        logits = self.model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=step.logits_rows,
        ).logits
        return logits[0]


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in chain(model.modules(), model.rest() if isinstance(model, TextPart) else ()):
        for values in (module._parameters, module._buffers, vars(module)):
            yield from (value for value in values.values() if isinstance(value, Tensor))
