"""Tests of bridle's own paged attention: when it is chosen, and the input of its kernels.

If Triton is installed, the kernels run in its interpreter and are compiled for GPUs that the machine may lack. On a GPU
the tests also run the kernels."""

from __future__ import annotations

import logging
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import ModelConfig
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.lora import adapter_kernel
from bridle.model.batch_inputs import PackedRow
from bridle.model.device_defaults import choose_dtype
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.h2d_copies import aligned
from bridle.model.kernels import create_kernel, paged, self_test
from bridle.model.kernels.block_table_slots import BlockTableSlots
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kernels.paged import PagedKernel, SequencePart, lay_out, turns
from bridle.model.kernels.varlen import VarlenKernel
from bridle.model.kv_profiling import default_block_size
from bridle.model.sequence_state import CachedRequestState
from tests.kernels import check_properties, needs_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
#: With so many, three programs of 128 threads fit on a multiprocessor of 65,536 registers.
DECODE_REGISTERS = 168


# -- the choice --------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the queries about GPU and Triton; return the settings of the fake machine."""
    machine = SimpleNamespace(capability=(9, 0), has_triton=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=8))
    monkeypatch.setattr(adapter_kernel, "find_spec", lambda name: name if machine.has_triton else None)
    return machine


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cuda_gets_the_paged_kernel_whatever_the_type(gpu: SimpleNamespace, dtype: torch.dtype) -> None:
    assert isinstance(create_kernel("auto", CUDA, dtype), PagedKernel)
    assert isinstance(create_kernel("auto", CPU, dtype), CpuKernel)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"capability": (7, 5)}, "a GPU of compute capability 8.0"), ({"has_triton": False}, "Triton, which torch for")],
)
def test_a_gpu_that_cannot_gets_plain_torch_and_the_log_says_why(
    gpu: SimpleNamespace, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    vars(gpu).update(settings)
    assert isinstance(create_kernel("auto", CUDA, torch.bfloat16), CpuKernel)
    assert reason in caplog.text
    with pytest.raises(InvalidRequest, match=reason) as caught:
        create_kernel("paged", CUDA, torch.bfloat16)
    assert caught.value.param == "kernel"


def test_an_older_torch_has_no_flash_attention_over_pages(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11's `varlen_attn` lacks the arguments for paging, which is found from its signature before any step
    runs."""

    def varlen_attn(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> None:
        raise AssertionError("asked for its arguments, never called")

    if torch.__version__ >= "2.12":
        assert isinstance(create_kernel("varlen", CUDA, torch.bfloat16), VarlenKernel)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    with pytest.raises(InvalidRequest, match=r"block_table, enable_gqa, num_splits, seqused_k \(2.12 or newer\)"):
        create_kernel("varlen", CUDA, torch.bfloat16)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)  # before 2.10 there is no such module
    with pytest.raises(InvalidRequest, match=r"2.12 or newer"):
        create_kernel("varlen", CUDA, torch.bfloat16)
    with pytest.raises(InvalidRequest, match="half precision"):
        create_kernel("varlen", CUDA, torch.float32)
    gpu.capability = (7, 5)
    with pytest.raises(InvalidRequest, match="compute capability"):
        create_kernel("varlen", CUDA, torch.float16)


class Wrong(CpuKernel):
    """A kernel with the name of bridle's own: its results are right up to `error`, or it raises `failure`."""

    name = "paged"

    def __init__(self, error: float = 0.0, failure: Exception | None = None) -> None:
        super().__init__()
        self._error, self._failure = error, failure

    def attend(self, *args: Any) -> torch.Tensor:
        if self._failure is not None:
            raise self._failure
        out = super().attend(*args)
        out[-1, -1, -1] += self._error
        return out


GEOMETRY = Geometry({n: LayerGeometry(4, 2, 8, 8, (None, 20)[n], bool(n), bool(n)) for n in range(2)}, 2)


def tried(kernel: Wrong, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(self_test, "create_kernel", lambda *args: kernel)
    return self_test.tried_kernel(name, CPU, torch.float32, GEOMETRY, 4)


def test_a_kernel_that_is_right_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Wrong()
    assert tried(kernel, "auto", monkeypatch) is kernel


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (Wrong(1.0), "differs by 1"),
        (Wrong(float("nan")), "differs by nan"),
        (Wrong(failure=RuntimeError("no C compiler")), "RuntimeError: no C compiler"),
        (Wrong(failure=ImportError("a broken Triton")), "ImportError: a broken Triton"),
    ],
)
def test_one_that_fails_gives_way_to_plain_torch(
    kernel: Wrong, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert type(tried(kernel, "auto", monkeypatch)) is CpuKernel
    assert problem in caplog.text
    with pytest.raises(UnsupportedModel, match=problem):
        tried(kernel, "paged", monkeypatch)


def test_a_full_device_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        tried(Wrong(failure=torch.OutOfMemoryError()), "auto", monkeypatch)


def test_what_follows_from_the_choice() -> None:
    """Pages have 16 tokens except for torch's own kernel, and a GPU uses float32 only if the settings say so."""
    assert default_block_size(ModelConfig()) == 16
    assert default_block_size(ModelConfig(kernel="varlen")) == 256
    assert default_block_size(ModelConfig(kernel="varlen", block_size=512)) == 512
    for own, want in ((torch.float32, torch.bfloat16), (None, torch.bfloat16), (torch.float16, torch.float16)):
        assert choose_dtype(ModelConfig(), SimpleNamespace(dtype=own), CUDA) is want  # type: ignore[arg-type]
        assert choose_dtype(ModelConfig(), SimpleNamespace(dtype=own), CPU) is torch.float32  # type: ignore[arg-type]
    wide = choose_dtype(ModelConfig(dtype="float32"), SimpleNamespace(dtype=torch.bfloat16), CUDA)  # type: ignore[arg-type]
    assert wide is torch.float32


# -- what the kernels read ---------------------------------------------------------------------------------------

LENGTHS = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 70)), min_size=1, max_size=6)


def rows_of(lengths: list[tuple[int, int]], size: int) -> list[PackedRow]:
    rows, offset, block = [], 0, 0
    for before, length in lengths:
        mirror = CachedRequestState()
        num_blocks = -(-(before + length) // size) + 1  # one is there already for what comes
        mirror.add_blocks(range(block, block + num_blocks))
        rows.append(PackedRow(offset, length, before + length, [], mirror))
        block += num_blocks
        offset += length
    return rows


@given(LENGTHS, st.sampled_from([1, 16, 256]))
def test_a_layout_has_each_chunk_of_each_short_row_once(lengths: list[tuple[int, int]], size: int) -> None:
    rows = rows_of(lengths, size)
    seats = BlockTableSlots()
    layout = lay_out(rows, size, seats)
    sequences = layout.words[: 5 * len(rows)].reshape(-1, 5)
    first = aligned(5 * len(rows), 4)
    works = layout.words[first:][: 2 * layout.num_works].reshape(-1, 2)
    second = first + aligned(2 * layout.num_works, 4)
    tiles = layout.words[second:][: 2 * layout.num_tiles].reshape(-1, 2)
    news = layout.words[second + aligned(2 * layout.num_tiles, 4) :][: 2 * layout.num_news].reshape(-1, 2)
    ordered = sorted(rows, key=lambda row: row.length > paged.MAX_SHORT)
    num_short = len(layout.short)
    assert [tuple(one[:3]) for one in sequences] == [(row.offset, row.length, row.context) for row in ordered]
    long = list(enumerate(ordered))[num_short:]
    assert tiles.tolist() == [[n, tile] for n, row in long for tile in range(-(-row.length // paged.TILE))]
    want = [(n, c) for n, row in enumerate(ordered[:num_short]) for c in range(-(-row.context // paged.CHUNK))]
    assert [tuple(work) for work in works] == want
    parts = [(n, sequences[n][3] + c * row.length, row.length) for n, c in want for row in [ordered[n]]]
    assert [begin for _, begin, _ in parts[1:]] == [begin + count for _, begin, count in parts[:-1]]
    told = dict(news.tolist())
    assert len(told) == len(news), "each page once"
    for row, sequence in zip(ordered, sequences, strict=True):
        for index, block in enumerate(row.mirror.blocks[: -(-row.context // size)]):
            assert told.pop(sequence[4] * seats.width + index) == block
    assert not told


class Device:
    """A fake device that receives only changes of block tables, and keeps the whole tables."""

    def __init__(self, num_seats: int, width: int) -> None:
        self.seats = BlockTableSlots()
        self.seats.num_seats, self.seats.width = num_seats, width
        self.pages: dict[int, int] = {}
        self._shape = (num_seats, width)

    def step(self, rows: list[PackedRow]) -> int:
        """Apply a step's changes of block tables; check that each row's table is then right, and return the number of
        changes."""
        numbers, news = self.seats.place(rows, 1)
        if self._shape != (shape := (self.seats.num_seats, self.seats.width)):
            self.pages, self._shape = {}, shape  # another table
        self.pages.update(news.tolist())
        assert len(set(numbers)) == len(rows)
        for number, row in zip(numbers, rows, strict=True):
            assert number < self.seats.num_seats
            first = number * self.seats.width
            assert [self.pages[first + place] for place in range(row.context)] == row.mirror.blocks[
                : row.context
            ].tolist()
        return len(news)


def row_of(mirror: CachedRequestState, context: int) -> PackedRow:
    return PackedRow(0, 1, context, [], mirror)


def test_only_new_pages_travel() -> None:
    device, one, two = Device(64, 16), CachedRequestState(), CachedRequestState()
    one.add_blocks((5, 6, 7))
    two.add_blocks((9,))
    assert device.step([row_of(one, 3), row_of(two, 1)]) == 4
    assert device.step([row_of(one, 3), row_of(two, 1)]) == 0
    one.add_blocks((8,))
    assert device.step([row_of(one, 4)]) == 1
    one.keep_blocks(2)
    one.add_blocks((11,))
    assert device.step([row_of(two, 1), row_of(one, 3)]) == 1
    fork = one.copy(0, 2)
    assert device.step([row_of(fork, 2), row_of(one, 3)]) == 2, "a fork has a seat of its own"


@given(st.data())
def test_a_device_knows_every_table_whatever_happened(data: st.DataObject) -> None:
    device, other = Device(2, 2), Device(2, 2)  # two devices may be told of the same sequences
    mirrors: list[CachedRequestState] = []
    block = 0
    for _ in range(data.draw(st.integers(1, 20))):
        if not mirrors or (len(mirrors) < 7 and data.draw(st.booleans())):
            mirrors.append(mirrors[0].copy(0, len(mirrors[0].blocks)) if mirrors else CachedRequestState())
        mirror = data.draw(st.sampled_from(mirrors))
        mirror.keep_blocks(data.draw(st.integers(0, len(mirror.blocks))))
        more = data.draw(st.integers(0, 3))
        mirror.add_blocks(range(block, block + more))
        block += more
        filled = [each for each in mirrors if each.blocks]
        if filled:
            chosen = data.draw(st.lists(st.sampled_from(filled), unique_by=id, min_size=1))
            rows = [row_of(each, data.draw(st.integers(1, len(each.blocks)))) for each in chosen]
            data.draw(st.sampled_from([device, other])).step(rows)


@given(LENGTHS, st.integers(1, 400))
def test_turns_cover_each_sequence_once_within_the_limit(lengths: list[tuple[int, int]], limit: int) -> None:
    short = lay_out(rows_of([(before, min(length, 32)) for before, length in lengths], 16), 16, BlockTableSlots()).short
    joined = list(turns(short, limit))
    assert [joined[0].first, *(one.last for one in joined)] == [one.first for one in joined] + [len(short)]
    for one in joined:
        assert one.num_parts <= limit or one.last == one.first + 1
        inside = short[one.first : one.last]
        assert one == SequencePart(
            inside[0].first,
            inside[-1].last,
            inside[0].first_work,
            sum(each.num_works for each in inside),
            inside[0].first_part,
            sum(each.num_parts for each in inside),
            max(each.longest for each in inside),
        )
    for one, other in pairwise(joined):
        assert one.num_parts + short[other.first].num_parts > limit, "as many as fit"


# -- the kernels -------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_properties_hold_in_the_interpreter() -> None:
    check_properties("tests/model/paged_properties.py")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", range(6))
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bf16"), (86, "fp16"), (90, "bf16"), (90, "fp32"), (100, "bf16")]
)
def test_kernels_compile_within_registers_and_shared_memory(
    capability: int, dtype: str, shape: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled without a GPU, and must fit into the registers and the shared memory of one program."""
    from tests.lora.compiled import MAX_SPILLED, SHARED_MEMORY, usage
    from tests.model.paged_compiled import SHAPES, compile_all, num_buffers

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in compile_all(capability, dtype, SHAPES[shape]):
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], kernel.name
        registers, spilled = usage(kernel, capability, tmp_path)
        assert registers <= 255, kernel.name
        assert spilled <= MAX_SPILLED, f"{kernel.name} spills {spilled} bytes"
        if kernel.name in ("attend_part", "attend_works") and dtype != "fp32":
            assert num_buffers(kernel) == [2, 2], f"{kernel.name} does not load ahead"
            # Older GPUs have shared memory for two of these programs, which may have more registers.
            is_few = capability >= 90 and max(SHAPES[shape].dim, SHAPES[shape].value_dim) <= 128
            assert not is_few or registers <= DECODE_REGISTERS, kernel.name
            assert not spilled, f"{kernel.name} spills {spilled} bytes"
        code = kernel.asm["ptx"]
        assert "cp.async.ca" not in code, f"{kernel.name} loads less than 16 bytes at a time"
        if kernel.name not in ("join_parts", "take_pages"):
            assert "cp.async.cg" in code or "ld.global.v4" in code, f"{kernel.name} does not load 16 bytes at a time"
            is_matrix = "mma" in code
            assert is_matrix == (dtype != "fp32"), f"{kernel.name} multiplies in matrix units, unless in float32"
