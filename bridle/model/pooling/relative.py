"""Encoders whose attention depends on the distance of tokens (MPNet, DeBERTa), adapted to packed passes.

The attention of transformers treats a row as one text. In this file, a module replaces an encoder's attention, and
projects the tokens of all packed texts at once. The module passes the attention handler a function that computes the
score bias of a block of texts. Outside a packed pass, the attention of transformers is used unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bridle.errors import UnsupportedModel
from bridle.model.forward_context import AttentionHandler, AttentionOptions, handler_or_none
from bridle.model.pooling.segments import Bias, SegmentAttention


def lower_relative(base: Any) -> None:
    """Replace the attention of an encoder with relative positions; other encoders are unchanged. Raises
    `UnsupportedModel` for an unknown variant."""
    lower = _FAMILIES.get(str(base.config.model_type))
    if lower is not None:
        lower(base)


def by_distance(length: int, values: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Return a matrix [..., length, length] with one value for each pair of a query and a key. The function `values`
    returns values [..., 2 * length - 1], one for each of the given distances. A distance is the query's position minus
    the key's, from 1 - length to length - 1."""
    found = values(torch.arange(1 - length, length, device=device))
    return found.unfold(-1, length, 1).flip(-1)


class _Packed(nn.Module):
    """Base class of modules that replace `inner`, an attention module of transformers. `encoder` is not registered as a
    submodule."""

    def __init__(self, inner: Any, encoder: Any) -> None:
        super().__init__()
        self.inner = inner
        self.layer_idx = 0
        self._encoder = (encoder,)

    def forward(self, rows: Tensor, *args: Any, **settings: Any) -> Any:
        handler = handler_or_none()
        if handler is None:
            return self.inner(rows, *args, **settings)
        return self._attend(handler, rows[0]).unsqueeze(0), None

    def _attend(self, handler: AttentionHandler, rows: Tensor) -> Tensor:
        """Compute attention over packed texts: [T, hidden] -> [T, hidden]"""
        raise NotImplementedError


# -- MPNet -------------------------------------------------------------------------------------------------------


def _lower_mpnet(base: Any) -> None:
    encoder = base.encoder
    for layer in encoder.layer:
        layer.attention.attn = _PackedMPNet(layer.attention.attn, encoder)
    whole = encoder.compute_position_bias
    # For all tokens of a packed pass at once, it would be a matrix over texts that do not attend to each other.
    encoder.compute_position_bias = lambda rows, *args, **settings: (
        whole(rows, *args, **settings) if handler_or_none() is None else None
    )


class _PackedMPNet(_Packed):
    """Attention of MPNet. MPNet has one bias for each head and distance bucket, which all layers share."""

    def _attend(self, handler: AttentionHandler, rows: Tensor) -> Tensor:
        inner, heads = self.inner, self.inner.num_attention_heads
        query, key, value = (layer(rows).unflatten(-1, (heads, -1)) for layer in (inner.q, inner.k, inner.v))
        options = AttentionOptions(inner.attention_head_size**-0.5)
        found = handler(self, query, key, value, options, {"bias": self._bias})
        out: Tensor = inner.o(found.flatten(1))
        return out

    def _bias(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the bias of a block of texts, [1, H, L, L]."""
        (encoder,) = self._encoder

        def values(behind: Tensor) -> Tensor:
            buckets = encoder.relative_position_bucket(-behind, num_buckets=_MPNET_BUCKETS)
            found: Tensor = encoder.relative_attention_bias(buckets).T  # [H, 2L-1]
            return found

        return by_distance(query.shape[2], values, query.device).unsqueeze(0)


#: The number of buckets that transformers uses, whatever the configuration says.
_MPNET_BUCKETS = 32


# -- DeBERTa -----------------------------------------------------------------------------------------------------


def _lower_deberta(base: Any) -> None:
    encoder = base.encoder
    kind = _PackedDeberta if base.config.model_type == "deberta" else _PackedDebertaV2
    if getattr(base.config, "talking_head", False):
        raise UnsupportedModel("this DeBERTa mixes its heads (talking_head), which packed batches do not support")
    for layer in encoder.layer:
        layer.attention.self = kind(layer.attention.self, encoder)
    for name in ("get_rel_pos", "get_attention_mask"):  # matrices over all tokens of a pass, which are not used here
        setattr(encoder, name, _unless_packed(getattr(encoder, name)))
    if getattr(encoder, "conv", None) is not None:
        encoder.conv = _PackedConv(encoder.conv)


def _unless_packed(whole: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, *args, **settings: whole(first, *args, **settings) if handler_or_none() is None else first


class _PackedDebertaV2(_Packed):
    """Attention of DeBERTa v2, with two bias terms. The first bias term depends on the query and the distance, the
    second term on the key and the distance. Distances are grouped into buckets."""

    def __init__(self, inner: Any, encoder: Any) -> None:
        super().__init__(inner, encoder)
        self._kinds = inner.pos_att_type if inner.relative_attention else ()
        self._tables: dict[str, Tensor] = {}

    def _attend(self, handler: AttentionHandler, rows: Tensor) -> Tensor:
        query, key, value = self._projected(rows)
        options = AttentionOptions(self._scaling(query.shape[-1]))
        bias: Bias | None = self._bias if self._kinds else None
        return handler(self, query, key, value, options, {"bias": bias}).flatten(1)

    def _scaling(self, width: int) -> float:
        terms = 1 + sum(kind in self.inner.pos_att_type for kind in ("c2p", "p2c"))
        return 1 / math.sqrt(width * terms)

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [T, H, D] each."""
        inner, heads = self.inner, self.inner.num_attention_heads
        query, key, value = (
            layer(rows).unflatten(-1, (heads, -1)) for layer in (inner.query_proj, inner.key_proj, inner.value_proj)
        )
        return query, key, value

    def _bias(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the bias [N, H, L, L] of queries and keys [N, H, L, D]."""
        length, scale = query.shape[2], self._scaling(query.shape[-1])
        bias: Tensor | float = 0.0
        if "c2p" in self._kinds:
            index = by_distance(length, lambda behind: self._index(self._buckets(behind)), query.device)
            bias = bias + _gathered(query @ self._table("c2p").mT * scale, index)
        if "p2c" in self._kinds:  # here keys are the rows, and queries the columns
            index = by_distance(length, lambda behind: self._index(-self._buckets(behind)), query.device)
            bias = bias + _gathered(key @ self._table("p2c").mT * scale, index).mT
        assert isinstance(bias, Tensor)
        return bias

    def _index(self, buckets: Tensor) -> Tensor:
        """Return the table row for each bucket."""
        return (buckets + self._span).clamp(0, 2 * self._span - 1)

    @property
    def _span(self) -> int:
        return int(self.inner.pos_ebd_size)

    def _buckets(self, behind: Tensor) -> Tensor:
        """Return the bucket of each distance: small distances unchanged, large distances grouped by their logarithm."""
        size, most = self.inner.position_buckets, self.inner.max_relative_positions
        if size <= 0 or most <= 0:
            return behind
        middle = size // 2
        far = behind.abs().clamp(min=middle).float()
        steps = torch.log(far / middle) / torch.log(torch.tensor((most - 1) / middle)) * (middle - 1)
        return torch.where(behind.abs() <= middle, behind, (torch.ceil(steps).long() + middle) * behind.sign())

    def _table(self, kind: str) -> Tensor:
        """Return the layer's vector for each distance, [H, 2 * span, D]. The vectors do not depend on the texts."""
        if kind not in self._tables:
            (encoder,) = self._encoder
            rows = self._layer(kind)(encoder.get_rel_embedding()[: 2 * self._span])
            self._tables[kind] = rows.unflatten(-1, (self.inner.num_attention_heads, -1)).transpose(0, 1).detach()
        return self._tables[kind]

    def _layer(self, kind: str) -> Any:
        inner = self.inner
        if inner.share_att_key:
            return inner.key_proj if kind == "c2p" else inner.query_proj
        return inner.pos_key_proj if kind == "c2p" else inner.pos_query_proj


class _PackedDeberta(_PackedDebertaV2):
    """Attention of DeBERTa v1, with one joint projection for queries, keys and values, and distances without
    buckets."""

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner, heads = self.inner, self.inner.num_attention_heads
        query, key, value = inner.in_proj(rows).unflatten(-1, (heads, -1)).chunk(3, -1)
        biases = (bias.unflatten(-1, (heads, -1)) for bias in (inner.q_bias, inner.v_bias))
        return query + next(biases), key, value + next(biases)

    def _scaling(self, width: int) -> float:
        return 1 / math.sqrt(width * (1 + len(self.inner.pos_att_type)))

    @property
    def _span(self) -> int:
        return int(self.inner.max_relative_positions)

    def _buckets(self, behind: Tensor) -> Tensor:
        return behind

    def _layer(self, kind: str) -> Any:
        return self.inner.pos_proj if kind == "c2p" else self.inner.pos_q_proj


class _PackedConv(nn.Module):
    """Applies a convolution to each packed text separately, so that neighbouring texts do not mix."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: Tensor, residual: Tensor, mask: Tensor) -> Tensor:
        """Convolve each packed text separately: both inputs and the result are [1, T, hidden]."""
        handler = handler_or_none()
        if not isinstance(handler, SegmentAttention):
            found: Tensor = self.inner(rows, residual, mask)
            return found
        out = torch.empty_like(residual)
        for block in handler.blocks:
            seen = torch.ones(block.num_texts, block.length, device=rows.device)
            block.of(out[0]).copy_(self.inner(block.of(rows[0]), block.of(residual[0]), seen))
        return out


def _gathered(scores: Tensor, index: Tensor) -> Tensor:
    """Gather scores: [N, H, L, 2 * span] at `index` [L, L] -> [N, H, L, L]"""
    return scores.gather(-1, index.expand(*scores.shape[:2], -1, -1))


_FAMILIES: dict[str, Callable[[Any], None]] = {
    "mpnet": _lower_mpnet,
    "deberta": _lower_deberta,
    "deberta-v2": _lower_deberta,
}
