"""Runs a loaded model over one packed step. This module uses tensors and the model; it does not handle plans or
sampling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from bridle.cpu_kernels.threads import torch_alone
from bridle.model import partial_logits
from bridle.model.attention import PagedAttention
from bridle.model.batch_inputs import PackedStep, Packer
from bridle.model.dense_model import DenseModel, try_lower_model
from bridle.model.forward_context import attention_handler
from bridle.model.h2d_copies import upload_list
from bridle.model.hybrid_model import HybridModel
from bridle.model.language_model import LanguageModel
from bridle.model.layer_taps import LayerTap, hooked
from bridle.model.media_encoder import Features
from bridle.model.partial_logits import PartialLogits
from bridle.model.tensor_parallel import num_ranks


class ModelRunner:
    """Runs a model of transformers with paged attention, in one call per step."""

    def __init__(self, model: nn.Module, attention: PagedAttention) -> None:
        self.model = model
        self.attention = attention
        self.lowered = try_lower_model(model)
        if self.lowered is not None:
            self.lowered.fuse(attention)
        self.hybrid: HybridModel | None = None  # the short form of a model with recurrent layers
        has_native_layers = self.lowered is not None and self.lowered.native is not None
        self._is_native = has_native_layers and attention.kernel.name == "native"
        # A few model classes compute the logits of all positions; the requested rows are then selected afterwards.
        self._can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._head_input = HeadInput(model)
        self.features: Callable[[bytes], Features] | None = None  # of images, by key, if the model takes images
        self.graphs: Packer | None = None  # of short steps, once they are captured
        self.hidden: Tensor | None = None  # [R, hidden] the last step's inputs of the head, if known
        self._tap: LayerTap | None = None  # of the current step

    def keep_angles(self, num_positions: int) -> None:
        """Compute the rotary angles of `num_positions` positions in advance, if the model's short forward function uses
        them."""
        short = self.lowered or self.hybrid
        if short is not None:
            short.keep_angles(num_positions)

    def use_hybrid(self, short: HybridModel | None) -> None:
        """From now on, compute steps by the short forward function of a model with recurrent layers, if it supports the
        step."""
        self.hybrid = short
        self._is_native = short is not None and short.is_whole

    def first_layers(self) -> AbstractContextManager[Sequence[int]]:
        """In this `with` block, a pass may skip layers that do not change its peak memory. Yields the numbers of the
        layers that are computed."""
        native = None if self.lowered is None else self.lowered.native
        if native is not None and self.attention.kernel.name == "native" and native.fits(self.attention.cache):
            return native.first_layers()
        return nullcontext(tuple(self.attention.cache.layers))

    @property
    def embedding_size(self) -> int:
        """Return the length of a row of `hidden`; 0 if the hidden states before the output head cannot be recorded."""
        return self._head_input.size

    @property
    def num_bytes(self) -> int:
        """Return the total bytes of weights, including converted copies, of the KV cache, and of recurrent states."""
        sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in _tensors(self.model)}
        states = self.attention.states
        return sum(sizes.values()) + self.attention.cache.num_bytes + (0 if states is None else states.num_bytes)

    @contextmanager
    def tapped(self, tap: LayerTap | None) -> Iterator[None]:
        """In this `with` block, steps call `tap` after each layer. Steps with a tap must not run as CUDA graphs."""
        hooks = nullcontext() if tap is None or self.lowered is not None else hooked(self.model, tap)
        self._tap = tap
        try:
            with hooks:
                yield
        finally:
            self._tap = None

    def run(self, step: PackedStep) -> Tensor:
        """Write the step's keys and values into the cache; return the logits [R, V] of its logits rows."""
        if step.replay is not None:
            logits, self.hidden = step.replay()
            return logits
        with self._computing(step):
            short = self._short_form(step)
            if short is not None:
                return short.logits(self._run_layers(short, step))
            with attention_handler(self.attention):
                logits = self._call(step)
            self.hidden = self._head_input.rows(step.logits_rows)
            return logits

    def run_in_parts(self, step: PackedStep) -> Tensor | PartialLogits:
        """Compute the same as `run`. On a CPU, large logits are computed later, when they are sampled, if this gives
        the same results."""
        short = self._short_form(step)
        size = 0 if short is None else short.vocab_size
        is_small = step.logits_rows.numel() * size <= partial_logits.MAX_LOGITS
        if short is None or is_small or step.input_ids.device.type != "cpu" or num_ranks() > 1:
            return self.run(step)
        with self._computing(step):
            return PartialLogits(self._run_layers(short, step), partial(self._compute_logits, short), size)

    def _compute_logits(self, short: DenseModel | HybridModel, hidden: Tensor) -> Tensor:
        """Compute logits from inputs of the output head: [R, hidden] -> [R, V]"""
        with torch.inference_mode(), self._threads():
            return short.logits(hidden)

    def _short_form(self, step: PackedStep) -> DenseModel | HybridModel | None:
        if self.hybrid is None or not self.hybrid.fits(self.attention):
            return self.lowered
        has_further = any(self.features(sight.key).further for sight in step.sights) if self.features else False
        return None if has_further else self.hybrid

    def _threads(self) -> AbstractContextManager[None]:
        return torch_alone() if self._is_native else nullcontext()

    @contextmanager
    def _computing(self, step: PackedStep) -> Iterator[None]:
        """In this `with` block, the attention handler is set up for `step`."""
        self.attention.step = step
        self.attention.kernel.begin(step)
        with torch.inference_mode(), self._threads():
            yield

    def _run_layers(self, short: DenseModel | HybridModel, step: PackedStep) -> Tensor:
        look = partial(self._look, step) if step.sights else None
        ids, positions, rows = step.input_ids, step.position_ids, step.logits_rows
        self.hidden = short.run_layers(ids, positions, rows, self.attention, look, self._tap)
        return self.hidden

    def _look(self, step: PackedStep, rows: Tensor) -> Tensor:
        """Return the embedded rows [T, hidden], with image features in the rows of images."""
        places, features = self._seen(step)
        return rows.index_copy(0, places, features)

    def _seen(self, step: PackedStep, further: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the indices [N] of the packed tokens that belong to images, and their features [N, hidden]. With
        `further`, return the features that this layer adds to its output (DeepStack)."""
        assert self.features is not None  # otherwise no plan names images
        numbers = [number for sight in step.sights for number in range(sight.offset, sight.offset + sight.length)]
        parts = []
        for sight in step.sights:
            found = self.features(sight.key)
            rows = found.rows if further is None else found.further[further]
            parts.append(rows[sight.first : sight.first + sight.length])
        return upload_list(numbers, torch.int64, step.input_ids.device), torch.cat(parts)

    def _call_with_sights(self, step: PackedStep) -> Tensor:
        assert self.features is not None
        places, features = self._seen(step)
        rows = self.model.get_input_embeddings()(step.input_ids[0]).index_copy(0, places, features)  # type: ignore[operator]
        extra: dict[str, Any] = {}
        depth = len(self.features(step.sights[0].key).further)
        if depth:
            mask = torch.zeros(1, step.num_tokens, dtype=torch.bool, device=rows.device)  # [1, T]
            mask[0, places] = True
            extra["visual_pos_masks"] = mask
            order = places.argsort()
            extra["deepstack_visual_embeds"] = [self._seen(step, layer)[1][order] for layer in range(depth)]
        logits: Tensor = self.model(
            input_ids=step.input_ids,
            inputs_embeds=rows.unsqueeze(0),
            places=places,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=step.logits_rows,
            **extra,
        ).logits
        return logits[0]

    def _call(self, step: PackedStep) -> Tensor:
        if step.sights:
            return self._call_with_sights(step)
        if not self._can_keep:
            logits: Tensor = self.model(
                input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False
            ).logits
            return logits[0].index_select(0, step.logits_rows)
        logits = self.model(
            input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, logits_to_keep=step.logits_rows
        ).logits
        return logits[0]


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in chain(model.modules(), model.rest() if isinstance(model, LanguageModel) else ()):
        for values in (module._parameters, module._buffers, vars(module)):
            yield from (value for value in values.values() if isinstance(value, Tensor))


class HeadInput:
    """Records the inputs of a model's output head. `size` is the length of an input; 0 if the output head cannot be
    found."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: Tensor | None = None
        head = _head_of(model)
        self.size = 0 if head is None else _size_of(model, head)
        if self.size:
            assert head is not None
            head.register_forward_pre_hook(self._see)

    def _see(self, _head: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen = inputs[0]

    def rows(self, logits_rows: Tensor) -> Tensor | None:
        """Return the recorded hidden states [R, hidden] of the rows that give logits, or None. If the output head got
        all T positions, the rows are selected."""
        seen, self._seen = self._seen, None
        if seen is None:
            return None
        flat = seen.reshape(-1, seen.shape[-1])
        return flat if flat.shape[0] == logits_rows.shape[0] else flat.index_select(0, logits_rows)


def _head_of(model: nn.Module) -> nn.Module | None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None


def _size_of(model: nn.Module, head: nn.Module) -> int:
    size = getattr(head, "in_features", None) or getattr(getattr(model, "config", None), "hidden_size", 0)
    return int(size or 0)
