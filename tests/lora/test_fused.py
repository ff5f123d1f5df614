"""Tests of the fused adapter kernels: when they are chosen, their fallback after an error, and their input.

If Triton is installed, the kernels run in its interpreter and are compiled for GPUs that the machine may lack. On a GPU
the tests also run the kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InvalidRequest, ModelUnavailable
from bridle.lora import adapter_kernel
from bridle.lora.adapter_kernel import TriedKernel, create_adapter_kernel
from bridle.lora.fused import FusedKernel, tiles_of
from bridle.lora.layout import LayoutCache
from bridle.lora.ops import Product, Segment
from bridle.lora.tables import table_values
from bridle.lora.torch_ops import TorchKernel
from bridle.lora.weights import PlacedAdapter
from tests.kernels import check_properties, needs_triton
from tests.lora.fused_kit import Sides, check_any_step, check_step, make_adapter, places_of, random_adapters

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SITES = [Sides(24, (16, 8)), Sides(8, (8,))]


def adapter_of(ranks: dict[str, int], layouts: LayoutCache | None = None, seed: int = 0) -> PlacedAdapter:
    places = places_of(SITES)
    return make_adapter(layouts or LayoutCache(places), places, ranks, torch.empty(0), seed)


# -- the choice --------------------------------------------------------------------------------------------------


def test_cpus_get_plain_torch() -> None:
    for name in ("auto", "torch"):
        assert type(create_adapter_kernel(name, CPU, torch.float32)) is TorchKernel


@pytest.mark.parametrize(("name", "reason"), [("fast", "must be one of auto, fused, torch"), ("fused", "needs")])
def test_what_cannot_be_had_is_refused(name: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        create_adapter_kernel(name, CPU, torch.float32)
    assert caught.value.param == "adapter_kernel"


def test_cuda_without_triton_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(adapter_kernel, "find_spec", lambda name: None)
    assert type(create_adapter_kernel("auto", CUDA, torch.float16)) is TorchKernel
    assert type(create_adapter_kernel("torch", CUDA, torch.float16)) is TorchKernel
    assert [record.message for record in caplog.records] == [
        "adapters are computed in plain torch, because the fused kernels need Triton, which torch for CUDA brings along"
    ]


def test_an_old_gpu_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(adapter_kernel, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert type(create_adapter_kernel("auto", CUDA, torch.float16)) is TorchKernel
    assert "a GPU of compute capability 8.0" in caplog.text
    with pytest.raises(InvalidRequest, match=r"needs a GPU of compute capability 8\.0; this is cuda"):
        create_adapter_kernel("fused", CUDA, torch.float16)


class Claimed:
    """A kernel that claims to be fused: its results are right up to `error`, or it raises `failure`."""

    def __init__(self, error: float = 0.0, failure: Exception | None = None) -> None:
        self._torch = TorchKernel()
        self._error, self._failure = error, failure

    def prepare(self, adapter: PlacedAdapter) -> None:
        if self._failure is not None:
            raise self._failure

    def products(self, segments: Sequence[Segment]) -> list[Product]:
        return [Off(product, self._error) for product in self._torch.products(segments)]

    def clear(self) -> None:
        self._torch.clear()


class Off:
    """A product of rows and adapters that is wrong by `error` in the last column of its last row."""

    def __init__(self, product: Product, error: float) -> None:
        self._product, self._error = product, error
        self.sites = product.sites

    def add(self, site: int, out: torch.Tensor, rows: torch.Tensor) -> None:
        self._product.add(site, out, rows)
        out[-1, -1] += self._error


def tried(claimed: Claimed, fallback: TorchKernel | None) -> TriedKernel:
    return TriedKernel(claimed, CPU, torch.float32, fallback)


def is_claimed(kernel: TriedKernel, adapter: PlacedAdapter) -> bool:
    return all(isinstance(product, Off) for product in kernel.products([Segment(0, 1, adapter)]))


def test_products_that_are_right_stay(caplog: pytest.LogCaptureFixture) -> None:
    kernel = tried(Claimed(), TorchKernel())
    for rank in (4, 20):
        adapter = adapter_of({"0.0": rank, "0.1": 8, "1.0": rank})
        kernel.prepare(adapter)
        assert is_claimed(kernel, adapter)
    assert not caplog.records


@pytest.mark.parametrize(
    ("claimed", "problem"),
    [
        (Claimed(error=1.0), "rank 8 over 24 features differs by 1"),
        (Claimed(error=float("nan")), "differs by nan"),
        (Claimed(failure=RuntimeError("no C compiler")), "RuntimeError: no C compiler"),
        (Claimed(failure=ImportError("a broken Triton")), "ImportError: a broken Triton"),
    ],
)
def test_the_first_that_is_wrong_ends_it(claimed: Claimed, problem: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    kernel, adapter = tried(claimed, TorchKernel()), adapter_of({"0.0": 8})
    for _ in range(2):
        kernel.prepare(adapter)
        assert not is_claimed(kernel, adapter)
    assert len(caplog.records) == 1, "it is said once"
    assert problem in caplog.records[0].message
    with pytest.raises(ModelUnavailable, match=problem):
        tried(claimed, None).prepare(adapter)


def test_a_full_device_is_no_reason() -> None:
    kernel, adapter = tried(Claimed(failure=torch.OutOfMemoryError()), TorchKernel()), adapter_of({"0.0": 8})
    with pytest.raises(torch.OutOfMemoryError):
        kernel.prepare(adapter)
    assert is_claimed(kernel, adapter)


# -- what the kernels read ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150)), min_size=1, max_size=8), st.sampled_from([16, 64]))
def test_tiles_cover_each_row_once(spans: list[tuple[int, int]], size: int) -> None:
    segments, tables, position = [], [], 0
    adapters = [adapter_of({"0.0": 8}, seed=seed) for seed in range(3)]
    for number, (gap, length) in enumerate(spans):
        segments.append(Segment(position + gap, position + gap + length, adapters[number % 3]))
        tables.append(number)
        position += gap + length
    tiles = list(tiles_of(segments, tables, size))
    assert all(0 < tile.stop - tile.start <= size for tile in tiles)
    covered = [(row, tile.weights, tile.table) for tile in tiles for row in range(tile.start, tile.stop)]
    assert covered == [
        (row, segment.adapter.flat.data_ptr(), table)
        for segment, table in zip(segments, tables, strict=True)
        for row in range(segment.start, segment.stop)
    ]


def test_a_table_says_where_everything_is() -> None:
    adapter = adapter_of({"0.0": 9, "0.1": 4})
    alone = adapter_of({"1.0": 8})
    # A is [24, 24], B of the first part [16, 16], of the second [8, 8]
    a, first = 24 * 24, 16 * 16
    assert table_values(adapter.layout) == [1, *(0, 24, 5, 2), *(a, 0, 16, 0, 16), *(a + first, 16, 8, 16, 8)]
    assert table_values(alone.layout) == [2, *(0, 0, 0, 0), *(0, 8, 9, 1), *(64, 0, 8, 0, 8)]


# -- the kernels -------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_properties_hold_in_the_interpreter() -> None:
    check_properties("tests/lora/fused_properties.py")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bf16"), (80, "fp32"), (86, "fp16"), (90, "bf16"), (90, "fp32")]
)
def test_kernels_compile_within_registers_and_shared_memory(
    capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of all sizes are compiled without a GPU, and must fit into the registers and the shared memory of one
    program."""
    from tests.lora.compiled import MAX_SPILLED, SHARED_MEMORY, compile_all, num_spilled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in compile_all(capability, dtype):
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], kernel.name
        assert num_spilled(kernel, capability, tmp_path) <= MAX_SPILLED, kernel.name
        code = kernel.asm["ptx"]
        assert "cp.async.cg" in code or "ld.global.v4" in code, f"{kernel.name} does not load 16 bytes at a time"
        assert "cp.async.ca" not in code, f"{kernel.name} loads less at a time"
        assert ("mma" in code) == (dtype != "fp32"), f"{kernel.name} multiplies in matrix units, unless in float32"


@pytest.mark.gpu
@needs_triton
@given(seed=st.integers(0, 1 << 30))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_gives_what_torch_gives(dtype: torch.dtype, seed: int) -> None:
    check_any_step(FusedKernel(CUDA), seed, torch.empty(0, dtype=dtype, device=CUDA), max_tokens=700)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_on_a_gpu_says_what_peft_says(family: str, tmp_path: Path) -> None:
    from tests.lora.fused_model import check_model

    check_model(family, tmp_path, device="cuda", dtype="float32", adapter_kernel="fused")


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sides_of_a_large_model(dtype: torch.dtype) -> None:
    """Sizes of layers are those of a model with 8 billion parameters, for decodes alone and beside a prompt."""
    from random import Random

    sites = [Sides(4096, (4096, 1024, 1024)), Sides(4096, (4096,)), Sides(4096, (14336, 14336)), Sides(14336, (4096,))]
    kernel = create_adapter_kernel("fused", CUDA, dtype)
    adapters = random_adapters(Random(1), sites, torch.empty(0, dtype=dtype, device=CUDA), 8)
    for adapter in adapters:
        kernel.prepare(adapter)
    for lengths in ([1] * 8, [1] * 7 + [1500]):
        starts = [sum(lengths[:number]) for number in range(8)]
        segments = [
            Segment(start, start + length, adapter)
            for start, length, adapter in zip(starts, lengths, adapters, strict=True)
        ]
        check_step(kernel, segments, sum(lengths) + 1, sites)
