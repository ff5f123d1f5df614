"""Benchmark of attention alone: bridle's kernels over its paged cache, for decoding and for prompts.

The kernels are compared with the time to read the bytes, other block sizes, libraries' kernels, and FlashInfer if it is
installed.

Calls are captured in one CUDA graph and timed by the device's clock, because a kernel takes less time than its launch
from Python. The calls alternate between several caches, so that no cache is read from the GPU's L2 cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.model.batch_inputs import pack_step
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels import paged_call
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.paged_call import Blocks
from bridle.model.kernels.prompts import candidates
from bridle.model.kernels.self_test import tried_kernel
from bridle.model.kv_cache import KVCache, LayerCache
from bridle.model.sequence_state import CachedRequestState
from scripts.card.models import SHAPES
from scripts.card.probe import Rates

Figures = Iterator[dict[str, Any]]
#: Calls of a graph, and bytes that their caches have together: more than a second-level cache holds.
_CALLS, _CACHES = 20, 256 << 20
_PAGE = 16
_WORKSPACE = 256 << 20
#: Replays of a graph, of which the fastest counts.
_REPLAYS = 5


@dataclass(frozen=True, slots=True)
class AttentionScene:
    """One decode step: `batch` sequences with one new token each, over `context` positions, with a model's attention
    heads."""

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
        """The number of pages of each sequence."""
        return -(-self.context // _PAGE)


SCENES = [
    AttentionScene(model, *size)
    for model in ("8b", "0.6b")
    for size in ((1, 1_024), (16, 1_024), (64, 1_024), (256, 1_024), (1, 16_384), (1, 131_072))
]
TOYS = [AttentionScene("toy", 2, 24)]


class AttentionInputs:
    """Random keys, values and queries of an `AttentionScene`, in several KV caches. The pages of one sequence are not
    contiguous."""

    def __init__(self, scene: AttentionScene, device: torch.device, dtype: torch.dtype) -> None:
        self.scene, self.device, self.dtype = scene, device, dtype
        self.geometry = Geometry({0: scene.heads}, 1)
        count = min(max(-(-_CACHES // self.num_bytes), 1), _CALLS) if device.type == "cuda" else 1
        self.caches = [self._cache() for _ in range(count)]
        self.query = torch.randn(scene.batch, scene.heads.num_heads, scene.heads.key_dim, device=device, dtype=dtype)

    def _cache(self) -> LayerCache:
        cache = KVCache(self.geometry, self.scene.batch * self.scene.pages, _PAGE, self.dtype, self.device).layers[0]
        for part in cache.parts:
            part.normal_()
        return cache

    def blocks(self, number: int) -> Sequence[int]:
        """Return the page numbers of one sequence."""
        return range(number, self.scene.batch * self.scene.pages, self.scene.batch)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that one call reads."""
        heads = self.scene.heads
        return 2 * self.scene.batch * self.scene.context * heads.num_kv_heads * heads.key_dim * self.dtype.itemsize


#: A call over one of the caches.
Call = Callable[[LayerCache], Tensor]


def attention(
    scenes: Sequence[AttentionScene],
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    has_time: Callable[[], bool],
) -> Figures:
    """Yield the seconds of a call and its share of the memory bandwidth; for FlashInfer also the largest difference
    from bridle's result."""
    has_peer = find_spec("flashinfer") is not None
    for scene in scenes:
        if not has_time():
            return
        room = AttentionInputs(scene, device, dtype)
        ours = _bridles(room)
        yield _figure("bridle", room, ours, rates)
        if has_peer and has_time():
            told = _beside(room, ours, rates)
            has_peer = "left_out" not in told
            yield told


def blocks(
    scenes: Sequence[AttentionScene],
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    has_time: Callable[[], bool],
) -> Figures:
    """Yield the same figures for other block sizes of the kernel: keys, warps and stages. Only scenes of the first
    model are measured."""
    for scene in (each for each in scenes if each.model == scenes[0].model):
        room = AttentionInputs(scene, device, dtype)
        for keys, warps, stages in product((32, 64, 128), (4, 8), (2, 3, 4)):
            if not has_time():
                return
            sizes = Blocks(paged_call.SHORT_ROWS, keys, warps, stages)
            with patch.object(paged_call, "blocks_for", lambda *_args, sizes=sizes: sizes):
                yield {
                    "keys": keys,
                    "warps": warps,
                    "stages": stages,
                    **_perhaps("bridle", room, _bridles(room), rates),
                }


def prompts(
    model: str, lengths: Sequence[int], device: torch.device, dtype: torch.dtype, has_time: Callable[[], bool]
) -> Figures:
    """Measure prompts of one sequence with bridle's kernel, and with libraries' kernels, which gather the sequence's
    pages first."""
    for length in lengths:
        scene = AttentionScene(model, 1, length)
        room = AttentionInputs(scene, device, dtype)
        query = torch.randn(length, scene.heads.num_heads, scene.heads.key_dim, device=device, dtype=dtype)
        kernel = _begun(room, length)
        found = [None, *candidates(dtype)] if isinstance(kernel, PagedKernel) else [None]
        for by in found:
            if not has_time():
                return
            if isinstance(kernel, PagedKernel):
                kernel.prompts = by
            yield _prompt(kernel, query, room, "own" if by is None else by.name)


def _prompt(kernel: Any, query: Tensor, room: AttentionInputs, name: str) -> dict[str, Any]:
    length, heads = len(query), room.scene.heads
    told = {"what": "prompt attention", "kernel": name, "model": room.scene.model, "tokens": length}
    options = AttentionOptions(heads.key_dim**-0.5)
    try:
        with torch.inference_mode():
            seconds = _best(lambda: kernel.attend(query, room.caches[0], options), room.device)
    except Exception as error:  # built for another device or release
        return told | {"left_out": f"{type(error).__name__}: {error}"[:500]}
    products = 2 * length**2 * heads.num_heads * heads.key_dim  # both products, half of each
    return told | {"call_us": 1e6 * seconds, "products_per_second": products / seconds}


def _beside(room: AttentionInputs, ours: Call, rates: Rates) -> dict[str, Any]:
    """Return FlashInfer's figure, or the reason why there is none. FlashInfer compiles its kernels on the machine that
    runs them."""
    try:
        theirs = _flashinfers(room)
        differs = float((ours(room.caches[0]) - theirs(room.caches[0])).abs().max())
        return _figure("flashinfer", room, theirs, rates) | {"max_difference": differs}
    except Exception as error:  # no compiler, another release
        return {"what": "attention", "peer": "flashinfer", "left_out": f"{type(error).__name__}: {error}"[:2000]}


def _perhaps(peer: str, room: AttentionInputs, call: Call, rates: Rates) -> dict[str, Any]:
    """Return a figure, or the reason why these block sizes cannot be measured."""
    try:
        return _figure(peer, room, call, rates)
    except Exception as error:  # more shared memory or registers than there are
        return {"what": "attention", "left_out": f"{type(error).__name__}: {error}"[:200]}


def _figure(peer: str, room: AttentionInputs, call: Call, rates: Rates) -> dict[str, Any]:
    def calls() -> None:
        for number in range(_CALLS):
            call(room.caches[number % len(room.caches)])

    with torch.inference_mode(), _captured(calls, room.device) as work:
        seconds = _best(work, room.device) / _CALLS
    scene = room.scene
    told = {"what": "attention", "peer": peer, "model": scene.model, "batch": scene.batch, "context": scene.context}
    return told | {"call_us": 1e6 * seconds, "floor_share": room.num_bytes / rates.copy_bytes / seconds}


@contextmanager
def _captured(work: Callable[[], None], device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield `work` captured as one CUDA graph; on a CPU, yield `work` itself."""
    work()  # kernels are compiled before they are captured
    if device.type != "cuda":
        yield work
        return
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    yield graph.replay


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of some calls, after a warm-up call. The device's clock measures them, if it
    has one."""
    times: list[float] = []
    for _ in range(_REPLAYS + 1):
        if device.type == "cuda":
            event: Any = torch.cuda.Event
            begin, end = (event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(1e-3 * begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return min(times[1:])


def _begun(room: AttentionInputs, length: int) -> Any:
    """Return bridle's kernel at the start of a step that computes the last `length` tokens of each sequence."""
    scene = room.scene
    kernel = tried_kernel(
        "paged" if room.device.type == "cuda" else "auto", room.device, room.dtype, room.geometry, _PAGE
    )
    mirrors = [CachedRequestState() for _ in range(scene.batch)]
    for number, mirror in enumerate(mirrors):
        mirror.tokens = [3] * scene.context
        mirror.add_blocks(room.blocks(number))
    rows = [PlanRow(number, scene.context - length, length) for number in range(scene.batch)]
    kernel.begin(pack_step(rows, mirrors, _PAGE, room.device, getattr(kernel, "words", None)))
    return kernel


def _bridles(room: AttentionInputs) -> Call:
    kernel, options = _begun(room, 1), AttentionOptions(room.scene.heads.key_dim**-0.5)
    return lambda cache: kernel.attend(room.query, cache, options)


def _flashinfers(room: AttentionInputs) -> Call:
    """Return a FlashInfer call over pages [pages, tokens, heads, D] at the addresses of bridle's KV slots."""
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

    def call(layer: LayerCache) -> Tensor:
        paged = tuple(part.view(-1, _PAGE, heads.num_kv_heads, heads.key_dim) for part in (layer.keys, layer.values))
        out: Tensor = wrapper.run(room.query, paged)
        return out

    return call
