"""Attention of decoding alone: bridle's kernel over its paged cache, and FlashInfer's over the same memory where it is
installed, each beside the bytes that have to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bridle.bench.gpu_models import SHAPES
from bridle.bench.gpu_probe import Rates, best_seconds
from bridle.engine.scheduling.step_plan import PlanRow
from bridle.model.batch_inputs import pack_step
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels.self_test import tried_kernel
from bridle.model.kv_cache import KVCache
from bridle.model.sequence_state import CachedRequestState

Figures = Iterator[dict[str, Any]]
#: Calls that are timed at once.
_CALLS = 20
_PAGE = 16
_WORKSPACE = 256 << 20


@dataclass(frozen=True, slots=True)
class AttentionScene:
    """Single tokens of `batch` sequences, each over `context` positions, with the heads of a model."""

    model: str
    batch: int
    context: int

    @property
    def heads(self) -> LayerGeometry:
        shape = SHAPES[self.model]
        dim = shape["head_dim"]
        return LayerGeometry(shape["num_attention_heads"], shape["num_key_value_heads"], dim, dim)

    @property
    def pages(self) -> int:
        """Of each sequence."""
        return -(-self.context // _PAGE)


class AttentionInputs:
    """Random keys, values and queries of a scene. Pages of a sequence do not lie side by side."""

    def __init__(self, scene: AttentionScene, device: torch.device, dtype: torch.dtype) -> None:
        self.scene, self.device, self.dtype = scene, device, dtype
        self.geometry = Geometry({0: scene.heads}, 1)
        self.cache = KVCache(self.geometry, scene.batch * scene.pages, _PAGE, dtype, device)
        for part in self.cache.layers[0].parts:
            part.normal_()
        self.query = torch.randn(scene.batch, scene.heads.num_heads, scene.heads.key_dim, device=device, dtype=dtype)

    def blocks(self, number: int) -> Sequence[int]:
        """The pages of a sequence."""
        return range(number, self.scene.batch * self.scene.pages, self.scene.batch)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that one call reads."""
        heads = self.scene.heads
        return 2 * self.scene.batch * self.scene.context * heads.num_kv_heads * heads.key_dim * self.dtype.itemsize


def attention(
    scenes: Sequence[AttentionScene],
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    has_time: Callable[[], bool],
) -> Figures:
    """Seconds of a call, and the share of what the memory gives; of FlashInfer's also how far the two differ."""
    has_peer = find_spec("flashinfer") is not None
    for scene in scenes:
        if not has_time():
            return
        room = AttentionInputs(scene, device, dtype)
        ours = _bridles(room)
        yield _figure("bridle", room, ours, rates)
        if has_peer and has_time():
            told = _beside(room, ours, rates)
            has_peer = "error" not in told
            yield told


def _beside(room: AttentionInputs, ours: Callable[[], Tensor], rates: Rates) -> dict[str, Any]:
    """FlashInfer's figure, or why there is none: it compiles its kernels where it runs."""
    try:
        theirs = _flashinfers(room)
        return _figure("flashinfer", room, theirs, rates) | {"max_difference": float((ours() - theirs()).abs().max())}
    except Exception as error:  # no compiler, another release
        return {"what": "attention", "peer": "flashinfer", "error": f"{type(error).__name__}: {error}"[:2000]}


def _figure(peer: str, room: AttentionInputs, call: Callable[[], Tensor], rates: Rates) -> dict[str, Any]:
    def calls() -> None:
        for _ in range(_CALLS):
            call()

    with torch.inference_mode():
        seconds = best_seconds(calls) / _CALLS
    scene = room.scene
    told = {"what": "attention", "peer": peer, "model": scene.model, "batch": scene.batch, "context": scene.context}
    return told | {"call_us": 1e6 * seconds, "floor_share": room.num_bytes / rates.copy_bytes / seconds}


def _bridles(room: AttentionInputs) -> Callable[[], Tensor]:
    scene = room.scene
    kernel = tried_kernel("auto", room.device, room.dtype, room.geometry, _PAGE)
    mirrors = [CachedRequestState() for _ in range(scene.batch)]
    for number, mirror in enumerate(mirrors):
        mirror.tokens = [3] * scene.context
        mirror.add_blocks(room.blocks(number))
    rows = [PlanRow(number, scene.context - 1, 1) for number in range(scene.batch)]
    kernel.begin(pack_step(rows, mirrors, _PAGE, room.device, getattr(kernel, "words", None)))
    options = AttentionOptions(scene.heads.key_dim**-0.5)
    return lambda: kernel.attend(room.query, room.cache.layers[0], options)


def _flashinfers(room: AttentionInputs) -> Callable[[], Tensor]:
    """Pages [pages, tokens, heads, D] where bridle's slots lie."""
    flashinfer: Any = import_module("flashinfer")
    scene, heads = room.scene, room.scene.heads
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=room.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": room.device}
    pages = [page for number in range(scene.batch) for page in room.blocks(number)]
    wrapper.plan(
        torch.arange(0, len(pages) + 1, scene.pages, **numbers),
        torch.tensor(pages, **numbers),
        torch.full((scene.batch,), scene.context - (scene.pages - 1) * _PAGE, **numbers),
        heads.num_heads,
        heads.num_kv_heads,
        heads.key_dim,
        _PAGE,
        q_data_type=room.dtype,
        kv_data_type=room.dtype,
    )
    layer = room.cache.layers[0]
    paged = tuple(part.view(-1, _PAGE, heads.num_kv_heads, heads.key_dim) for part in (layer.keys, layer.values))
    return lambda: wrapper.run(room.query, paged)
