"""Computes a whole model with recurrent layers by one short function: embedding, layers in C kernels, norm, and output
head. The function is used only after a trial in which it gave the same logits as the model of transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bridle.cpu_kernels.library import kernels
from bridle.engine.scheduling.step_plan import PlanRow
from bridle.errors import InternalError, UnsupportedFeature
from bridle.model.attention import PagedAttention
from bridle.model.batch_inputs import PackedStep, pack_step
from bridle.model.dense_layer import Rotation, rotation
from bridle.model.dense_model import as_embedding
from bridle.model.forward_context import attention_handler
from bridle.model.geometry import Geometry
from bridle.model.hybrid_layers import LayerReader
from bridle.model.hybrid_mixers import CannotDescribe
from bridle.model.kernels.native import NativeKernel
from bridle.model.kv_cache import KVCache
from bridle.model.layer_taps import LayerTap, decoder_layers, hooked
from bridle.model.linear import as_function
from bridle.model.native_step import NativeStep
from bridle.model.sequence_state import CachedRequestState
from bridle.model.state_pool import StatePool

_log = logging.getLogger(__name__)

_LAST_NORMS = ("norm", "embedding_norm", "norm_f", "final_layernorm")
_ROTARIES = ("rotary_emb", "pos_emb")
_TRIAL_TOKENS, _TRIAL_PAGE = 7, 4
#: Maximum error of a layer, relative to the values that it adds. Rows are rounded to 8 bits before quantized products,
#: with a scale from the row's largest value. A tiny difference can change the rounding, so errors are root mean
#: squares.
_TOLERANCE, _ROUNDED_TOLERANCE = 1e-4, 1e-2
#: Maximum error of a layer, relative to its outputs.
_ROUNDING = 1e-6


class HybridModel:
    """The short forward function for `model`. Raises `CannotDescribe` if the model has another structure."""

    def __init__(self, model: Any, geometry: Geometry) -> None:
        found, body = kernels(), model.model
        if found is None or not geometry.layers:
            raise CannotDescribe("no kernels for this processor" if found is None else "no attention")
        self._lookup = as_embedding(model.get_input_embeddings())
        self._embedding_scale = float(getattr(body, "embedding_multiplier", 1.0))
        scale = float(getattr(model.config, "logits_scaling", 1.0))
        self._logits_scale = scale / float(getattr(body, "lm_head_multiplier", 1.0))
        self._rotary: Any = next((getattr(body, name) for name in _ROTARIES if hasattr(body, name)), None)
        self._norm: nn.Module = next(getattr(body, name) for name in _LAST_NORMS if hasattr(body, name))
        reader = LayerReader(geometry, found, self._rotary is not None)
        if not reader.heads.fit(found.lanes):
            raise CannotDescribe(f"the kernels do not support {reader.heads}")
        found_in = [reader.read(layer) for layer in decoder_layers(model)]
        layers = [part for parts in found_in for part in parts]
        numbers = [number for number, parts in enumerate(found_in) for _ in parts]
        ends = {number: part for part, number in enumerate(numbers)}
        self._ends = {part: number for number, part in ends.items()}
        self._inner = [vars(module) for each in layers for module in each.inner]
        self._networks = {number: each.network for number, each in enumerate(layers) if each.network is not None}
        described, parts = [each.layer for each in layers], [each.parts for each in layers]
        turned = self.rotations(torch.zeros(1, 1, dtype=torch.long))[0][0].shape[-1]
        self.native = NativeStep(found, numbers, parts, described, reader.heads, turned)
        head = model.get_output_embeddings()
        self._head = as_function(head)
        self.vocab_size = int(getattr(head, "out_features", 0))  # 0: unknown
        self.is_rounded = any(matrix.kind != "float32" for layer in described for matrix in layer.matrices)

    def fits(self, attention: PagedAttention) -> bool:
        """Return whether the kernels can compute the next step."""
        if any("forward" in state for state in self._inner):
            return False
        return attention.kernel.name == "native" and attention.states is not None and self.native.fits(attention.cache)

    @property
    def is_whole(self) -> bool:
        """Return whether the kernels compute all parts of every layer, so that no module of transformers is needed."""
        return not self._networks

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids: [T] -> [T, hidden]"""
        rows: Tensor = self._lookup(ids)
        return rows if self._embedding_scale == 1.0 else rows * self._embedding_scale

    def keep_angles(self, num_positions: int) -> None:
        """Compute the rotary angles of `num_positions` positions in advance, and keep them in memory."""
        self.native.keep_angles(self.rotations, num_positions)

    def rotations(self, position_ids: Tensor) -> list[Rotation]:
        """Return the cosines and sines of positions [1, T], or [3, 1, T]. For models without rotary positions, the
        values are dummies that no layer reads."""
        if self._rotary is None:
            return [(torch.zeros(position_ids.shape[-1], 1, 2),) * 2]
        return [rotation(*self._rotary(torch.empty(0), position_ids))]

    def run_layers(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_rows: Tensor,
        attend: PagedAttention,
        look: Callable[[Tensor], Tensor] | None = None,
        tap: LayerTap | None = None,
    ) -> Tensor:
        """Compute the inputs of the output head [R, hidden] from ids and positions [1, T] and R indices into T. `look`
        puts image features into the embedded rows [T, hidden]; `tap` is called after each layer."""
        assert attend.step is not None
        rows = self.embed(input_ids[0])
        rows = rows if look is None else look(rows)
        after = self._after(tap) if self._networks or tap is not None else None
        with attention_handler(attend):
            hidden = self.native.advance(
                rows, position_ids, self.rotations, attend.cache, attend.step, after, attend.states
            )
        normed: Tensor = self._norm(hidden.index_select(0, logits_rows))
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Inputs of the head [R, hidden] -> logits [R, V]"""
        logits: Tensor = self._head(hidden)
        return logits if self._logits_scale == 1.0 else logits / self._logits_scale

    def _after(self, tap: LayerTap | None) -> LayerTap:
        def after(part: int, hidden: Tensor) -> None:
            network = self._networks.get(part)
            if network is not None:
                hidden.add_(network(hidden))
            if tap is not None and part in self._ends:
                tap(self._ends[part], hidden)

        return after


def try_hybrid_model(model: Any, geometry: Geometry) -> HybridModel | None:
    """Return the short forward function for `model`; None if the kernels cannot compute its layers, or a layer gives
    another result."""
    try:
        short = HybridModel(model, geometry)
        _compare(model, geometry, short)
    except (CannotDescribe, AttributeError, InternalError, LookupError, StopIteration, UnsupportedFeature) as problem:
        _log.info("layers are computed one by one, not in a joint kernel call: %s", problem)
        return None
    return short


@torch.inference_mode()
def _compare(model: Any, geometry: Geometry, short: HybridModel) -> None:
    """Raise `CannotDescribe` unless each layer and the output head give the same results as in transformers."""
    limit, wanted = (_ROUNDED_TOLERANCE if short.is_rounded else _TOLERANCE), []
    step, attention = _trial(geometry)
    ids, positions = step.input_ids, step.position_ids
    with attention_handler(attention), hooked(model, lambda _, rows: wanted.append(rows.clone())):
        logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    inputs = [short.embed(ids[0]), *wanted]

    def check(number: int, rows: Tensor) -> None:
        want = inputs[number + 1]
        _check(f"layer {number}", rows, want, limit * _size(want - inputs[number]) + _ROUNDING * _size(want))
        rows.copy_(want)

    step, attention = _trial(geometry)
    have = short.logits(short.run_layers(ids, positions, step.logits_rows, attention, tap=check))
    _check("the head", have, logits, limit * _size(logits))


def _check(what: str, have: Tensor, want: Tensor, limit: float) -> None:
    error = _size(have - want)
    if not error <= limit:
        raise CannotDescribe(f"the kernels' result for {what} differs by {error:.2g}, more than {limit:.2g}")


def _size(rows: Tensor) -> float:
    return float(rows.square().mean().sqrt())


def _trial(geometry: Geometry) -> tuple[PackedStep, PagedAttention]:
    """Return a step with one sequence, whose blocks are scattered, and an attention handler for it."""
    found = kernels()
    assert found is not None
    device = torch.device("cpu")
    cache = KVCache(geometry, 3, _TRIAL_PAGE, torch.float32, device)
    attention = PagedAttention(cache, NativeKernel(found), StatePool(geometry.states, 1, device))
    mirror = CachedRequestState()
    mirror.tokens = [*range(_TRIAL_TOKENS)]
    mirror.add_blocks((2, 0))
    row = PlanRow(0, 0, _TRIAL_TOKENS, _TRIAL_TOKENS, state=0)
    attention.step = step = pack_step([row], [mirror], _TRIAL_PAGE, device)
    attention.kernel.begin(step)
    return step, attention
