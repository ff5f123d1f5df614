"""Computes a whole dense model by one short function. All decoder layers must be lean layers.

The function avoids the work of transformers around the layers in every call: argument handling, masks, output objects.
The function is used only after a trial in which it gave the same logits as the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bridle.model.attention import PagedAttention
from bridle.model.dense_layer import (
    DenseLayer,
    Norm,
    Rotation,
    angles,
    are_lean,
    attend_causally,
    is_close,
    rotation,
    table_names,
)
from bridle.model.forward_context import AttentionHandler, attention_handler
from bridle.model.fused_step import FusedStep, try_fused_step
from bridle.model.layer_taps import LayerTap
from bridle.model.linear import as_function
from bridle.model.native_step import try_native_step
from bridle.model.restored import RestoredModel


class DenseModel:
    """The short forward function for `model`, which must be of a dense family with only `DenseLayer` layers."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self._embed = as_embedding(body.embed_tokens)
        self._rotary: nn.Module = body.rotary_emb
        self.layers: list[DenseLayer] = list(body.layers)
        self.norm = body.norm if isinstance(body.norm, Norm) else Norm(body.norm)
        self._head = as_function(model.lm_head)
        self.vocab_size = int(getattr(model.lm_head, "out_features", 0))  # 0: unknown
        self._embedding_scale = float(getattr(body, "embedding_multiplier", 1.0))
        self._logits_scale = float(getattr(model.config, "logits_scaling", 1.0))
        self._logits_cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        names = table_names(model)
        self._tables = list(dict.fromkeys(names[layer.layer_idx] for layer in self.layers))
        self.hidden: Tensor | None = None  # [R, hidden] the inputs of the head in the last pass
        for layer in self.layers:
            layer.table = self._tables.index(names[layer.layer_idx])
            layer.bind()
        self.native = try_native_step(self.layers)
        self.fused: FusedStep | None = None
        self._dtype: torch.dtype = body.norm.weight.dtype

    def fuse(self, attention: PagedAttention) -> None:
        """Compute later steps by fused kernels with few launches, if the device of `attention` supports this."""
        self.fused = try_fused_step(self.layers, self.norm, attention, self._dtype)

    def keep_angles(self, num_positions: int) -> None:
        """Compute the rotary angles of `num_positions` positions in advance, if fused GPU kernels or the C kernels
        compute the steps."""
        if self.fused is not None:
            self.fused.keep_angles(self.rotations, num_positions)
        elif self.native is not None:
            self.native.keep_angles(self.rotations, num_positions)

    def rotations(self, position_ids: Tensor) -> list[Rotation]:
        """Return the cosines and sines of positions [1, T] for each rotation table."""
        rows = torch.empty(0, dtype=self._dtype, device=position_ids.device)
        return [rotation(*angles(self._rotary, rows, position_ids, name)) for name in self._tables]

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_rows: Tensor,
        attend: AttentionHandler,
        look: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Compute logits [R, V] from ids and positions [1, T] and R indices into T. `look` writes image features into
        the embedded rows [T, hidden]."""
        return self.logits(self.run_layers(input_ids, position_ids, logits_rows, attend, look))

    def run_layers(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_rows: Tensor,
        attend: AttentionHandler,
        look: Callable[[Tensor], Tensor] | None = None,
        tap: LayerTap | None = None,
    ) -> Tensor:
        """Compute all layers, and return the inputs of the output head, [R, hidden]. `tap` is called after each
        layer."""
        rows = self._embed(input_ids[0])  # [T, hidden]
        if look is not None:
            rows = look(rows)
        if self._embedding_scale != 1.0:
            rows = rows * self._embedding_scale
        if self.fused is not None and tap is None and isinstance(attend, PagedAttention):
            turned = self.fused.angles(position_ids, self.rotations)
            self.hidden = self.fused.advance(rows, turned, attend).index_select(0, logits_rows)
        else:
            self.hidden = self.norm(self._advance(rows, position_ids, attend, tap).index_select(0, logits_rows))
        return self.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V] from inputs of the output head [R, hidden]."""
        logits = self._head(hidden)
        if self._logits_scale != 1.0:
            logits = logits / self._logits_scale
        if self._logits_cap is not None:
            logits = torch.tanh(logits / self._logits_cap) * self._logits_cap
        return logits

    def _advance(
        self, rows: Tensor, position_ids: Tensor, attend: AttentionHandler, tap: LayerTap | None = None
    ) -> Tensor:
        """Compute all layers: [T, hidden] -> [T, hidden]."""
        if self.native is not None and isinstance(attend, PagedAttention) and attend.is_native:
            assert attend.step is not None
            if self.native.fits(attend.cache):
                return self.native.advance(rows, position_ids, self.rotations, attend.cache, attend.step, tap)
        turns = [rotation(*angles(self._rotary, rows, position_ids, name)) for name in self._tables]
        for number, layer in enumerate(self.layers):
            rows = layer.advance(rows, turns[layer.table], attend)
            if tap is not None:
                tap(number, rows)
        return rows


def as_embedding(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function for `module` that avoids the cost of a module call if `module` is an `nn.Embedding`."""
    if type(module) is nn.Embedding:
        weight = module.weight
        return lambda ids: nn.functional.embedding(ids, weight)
    function: Callable[[Tensor], Tensor] = module.forward
    return function


def try_lower_model(model: Any) -> DenseModel | None:
    """Return the short forward function for `model`; None if the model has another structure or the function gives
    other logits."""
    if not are_lean(model):
        return None
    try:
        short = DenseModel(model)
    except AttributeError:
        return None
    if isinstance(model, RestoredModel):
        return short  # the short form was verified before it was kept
    ids = torch.arange(5, device=model.device).unsqueeze(0)  # [1, 5]
    with torch.inference_mode(), attention_handler(attend_causally):
        want = model(input_ids=ids, position_ids=ids, use_cache=False).logits[0]  # [5, V]
        have = short(ids, ids, ids[0], attend_causally)
    return short if is_close(want, have) else None
