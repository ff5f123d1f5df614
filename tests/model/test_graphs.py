"""Tests of CUDA graphs of short steps: which steps have a graph, the content of its fixed memory, and failures of its
capture.

Properties of graphs are tested in Triton's interpreter; `test_device_lint.py` counts the uploads and launches of a step
with a graph."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import ModelConfig
from bridle.engine.interfaces import ExecutorInfo
from bridle.model import graph_loading, tensor_parallel
from bridle.model.batch_inputs import PackedRow
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.graph_kinds import MOST_TOKENS, GraphKind
from bridle.model.graph_loading import GraphLoader, graph_loader
from bridle.model.graphs import StepGraphs
from bridle.model.kernels import paged
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.prompts import MIN_TOKENS
from bridle.model.kernels.rows import NEWS_ROOM, StepShape, num_words, parts_of
from bridle.model.sequence_state import CachedRequestState
from bridle.model.static_step import StaticStep, StepCapacity
from tests.model.rank_threads import Ranks
from tests.model.tape import TapeRecorder
from tests.sources import ROOT

CPU = torch.device("cpu")
BLOCK, SPARE, SEATS = 4, 999, 16
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton (pip install 'bridle-llm[fused]')")


PLAIN, LONG = GraphKind(), GraphKind(has_long=True)


def test_few_sizes_hold_every_short_step() -> None:
    sizes = PLAIN.sizes(MOST_TOKENS)
    assert sizes[:4] == [1, 2, 4, 8]
    assert sizes[-1] == MOST_TOKENS
    assert len(sizes) < 48
    assert all(after - before <= max(8, before / 4) for before, after in pairwise(sizes))
    assert PLAIN.sizes(20) == [1, 2, 4, 8, 16]
    assert GraphKind(has_adapters=True).sizes(MOST_TOKENS)[-1] == 64


@pytest.mark.parametrize("has_adapters", [False, True])
def test_few_sizes_hold_every_step_with_a_long_chunk(has_adapters: bool) -> None:
    kind = GraphKind(has_long=True, has_adapters=has_adapters)
    sizes = kind.sizes(4_096)
    assert (sizes[0], sizes[-1], len(sizes)) == (64, 512, 11)
    assert all(after - before <= 64 for before, after in pairwise(sizes))
    assert kind.sizes(paged.MAX_SHORT) == kind.sizes(63) == [], "there is no long chunk in a step"


@given(st.integers(33, MOST_TOKENS), st.integers(1, 300))
def test_a_step_with_long_chunks_has_room_for_all_that_fit(size: int, max_seqs: int) -> None:
    shape = LONG.shape(size, max_seqs)
    shortest = [paged.MAX_SHORT + 1] * (size // (paged.MAX_SHORT + 1))
    assert len(shortest) == shape.num_long
    for lengths in (shortest, [size], [65, size - 65] if size > 2 * 65 else [size]):
        assert len(paged.tiles_of(lengths, 0)) <= shape.num_tiles
    assert shape.num_logits == min(size, max_seqs)
    assert MOST_TOKENS < MIN_TOKENS, "a chunk in a graph is computed by the kernel that it has elsewhere"


# -- numbers at fixed places -----------------------------------------------------------------------------------------


SHAPE, SHAPE_LONG = PLAIN.shape(64, 16), LONG.shape(256, 16)


def static(num_works: int = 4_000) -> StaticStep:
    kernel = PagedKernel(CPU)
    kernel.seats.num_seats, kernel.seats.width = SEATS, 600
    return StaticStep(kernel, StepCapacity(SHAPE_LONG, num_works), BLOCK, SPARE, CPU)


def row_of(mirror: CachedRequestState, offset: int, before: int, length: int) -> PackedRow:
    return PackedRow(offset, length, before + length, [], mirror)


CHUNKS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 8)), min_size=1, max_size=6)


def packed(chunks: list[tuple[int, int]]) -> tuple[list[PackedRow], list[int]]:
    """Return rows of sequences in separate blocks, and the positions of their tokens."""
    rows: list[PackedRow] = []
    positions: list[int] = []
    for number, (before, length) in enumerate(chunks):
        mirror = CachedRequestState()
        mirror.add_blocks(range(200 * number, 200 * number + -(-(before + length) // BLOCK)))
        rows.append(row_of(mirror, len(positions), before, length))
        positions += range(before, before + length)
    return rows, positions


@given(CHUNKS, CHUNKS)
def test_each_token_is_a_row_of_its_own_whatever_was_there_before(
    earlier: list[tuple[int, int]], chunks: list[tuple[int, int]]
) -> None:
    step, told, size = static(), {}, SHAPE.num_tokens
    for each in (earlier, chunks):
        rows, positions = packed(each)
        count = len(positions)
        slots = [5_000 + number for number in range(count)]
        assert step.takes(rows)
        assert step.write(SHAPE, range(count), positions, slots, [count - 1], rows)
        numbers = step.numbers(SHAPE)
        told |= dict(numbers.news.tolist())
    view = step.view(SHAPE)
    missing = size - count
    assert view.input_ids.tolist() == [[*range(count), *[0] * missing]]
    assert view.position_ids.tolist() == [[*positions, *[0] * missing]]
    assert view.slots.tolist() == [*slots, *[SPARE * BLOCK] * missing]
    assert view.logits_rows.tolist() == [count - 1, *[0] * (size - 1)]
    own = [*positions, *[0] * missing]
    mirrors = [row.mirror for row in rows for _ in range(row.length)]
    part = 0
    for number, (sequence, position) in enumerate(zip(numbers.sequences.tolist(), own, strict=True)):
        assert sequence[:4] == [number, 1, position + 1, part]
        pages = [told[sequence[4] * 600 + page] for page in range(position // BLOCK + 1)]
        assert pages == (mirrors[number].blocks[: len(pages)].tolist() if number < count else [SPARE])
        chunks_of = position // paged.CHUNK + 1
        assert numbers.works[part : part + chunks_of].tolist() == [[number, chunk] for chunk in range(chunks_of)]
        part += chunks_of
    assert numbers.counts[0] == part


MIXED = st.lists(st.tuples(st.integers(0, 300), st.sampled_from((1, 1, 2, 32, 33, 64, 65))), min_size=1, max_size=3)


@given(MIXED, MIXED)
def test_a_long_chunk_has_tiles_and_its_tokens_nothing(
    earlier: list[tuple[int, int]], chunks: list[tuple[int, int]]
) -> None:
    """A long chunk is computed in tiles, tokens of short chunks row by row, whatever the memory held before."""
    step = static()
    for each in (earlier, chunks):
        rows, positions = packed(each)
        count = len(positions)
        assert step.write(SHAPE_LONG, range(count), positions, range(count), [count - 1], rows)
    numbers, view = step.numbers(SHAPE_LONG), step.view(SHAPE_LONG)
    assert view.logits_rows.tolist() == [count - 1, *[0] * 15]
    is_long = [row.length > paged.MAX_SHORT for row in rows for _ in range(row.length)]
    lengths = numbers.sequences[:, 1].tolist()
    assert lengths == [*(int(not each) for each in is_long), *[1] * (256 - count)]
    works = numbers.works[: int(numbers.counts[0])].tolist()
    assert works == [
        [number, chunk]
        for number, position in enumerate([*positions, *[0] * (256 - count)])
        if lengths[number]
        for chunk in range(position // paged.CHUNK + 1)
    ]
    long = [row for row in rows if row.length > paged.MAX_SHORT]
    told = [[row.offset, row.length, row.context, 0, row.mirror.seat.number] for row in long if row.mirror.seat]
    assert numbers.long.tolist() == [*told, *[[0] * 5] * (SHAPE_LONG.num_long - len(long))]
    tiles = paged.tiles_of([row.length for row in long], 0).tolist()
    assert numbers.tiles[: len(tiles)].tolist() == tiles
    assert all(tile * paged.TILE > 256 for _, tile in numbers.tiles[len(tiles) :].tolist()), "nobody's"


def test_a_step_with_more_than_there_is_room_for_has_no_graph() -> None:
    step = static()
    rows, positions = packed([(0, 33)])
    assert not step.write(SHAPE, range(33), positions, range(33), [32], rows), "a long chunk among short ones"
    assert not step.write(SHAPE_LONG, range(33), positions, range(33), range(17), rows), "logits of many tokens"
    assert step._kernel.seats._seats == [], "nobody is told anything"
    assert step.write(SHAPE_LONG, range(33), positions, range(33), range(16), rows)


def test_what_has_no_graph_is_told_apart() -> None:
    step = static()
    mirror = CachedRequestState()
    seen = CachedRequestState()
    seen.media = (SimpleNamespace(),)  # type: ignore[assignment]
    assert step.takes([row_of(mirror, 0, 600, paged.MAX_SHORT)])
    assert not step.takes([row_of(seen, 0, 0, 1)])
    assert not step.takes([row_of(mirror, 0, 600 * BLOCK, 1)]), "more pages than a table has"
    assert step.takes([row_of(mirror, 0, 0, 1)] * (SEATS - 1))
    assert not step.takes([row_of(mirror, 0, 0, 1)] * SEATS), "one seat is nobody's"


def test_a_step_of_too_many_works_tells_nobody_anything() -> None:
    step = static(num_works=10)
    rows, positions = packed([(0, 4), (2_000, 1)])
    assert not step.write(StepShape(8, 8), range(5), positions, range(5), [4], rows)
    assert step._kernel.seats._seats == []
    assert step.write(StepShape(8, 8), range(4), positions[:4], range(4), [3], rows[:1])


def test_pages_beyond_their_room_are_told_before_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    step, told = static(), {}
    monkeypatch.setattr(step._kernel, "take", lambda news, count: told.update(news[:count].tolist()))
    rows, positions = packed([(4 * NEWS_ROOM + 40, 1)])
    single = StepShape(1, 1)
    assert step.write(single, [1], positions, [1], [0], rows)
    assert len(told) == NEWS_ROOM + 11 + 1 - NEWS_ROOM
    told.update(step.numbers(single).news.tolist())
    seat = int(step.numbers(single).sequences[0, 4])
    assert [told[seat * 600 + page] for page in range(NEWS_ROOM + 11)] == list(rows[0].mirror.blocks)


@given(st.integers(1, 70), st.integers(0, 3), st.integers(0, 50))
def test_parts_fill_their_words(num_tokens: int, num_long: int, num_works: int) -> None:
    shape = StepShape(num_tokens, num_tokens, num_long)
    words = np.arange(num_words(shape, num_works), dtype=np.int32)
    parts = parts_of(words, shape)
    assert (parts.sequences.shape, parts.works.shape) == ((num_tokens, 5), (num_works, 2))
    assert (parts.long.shape, parts.tiles.shape) == ((num_long, 5), (shape.num_tiles, 2))
    filled = [part for part in parts if part.size]
    assert all((part.ctypes.data - words.ctypes.data) % 16 == 0 for part in filled), "or kernels are compiled again"
    assert 0 <= words.size - sum(part.size for part in parts) < 5 * 4


# -- loading ---------------------------------------------------------------------------------------------------------

INFO = ExecutorInfo("m", 300, 64, 32, BLOCK, max_num_batched_tokens=8)
GEOMETRY = Geometry({0: LayerGeometry(4, 2, 64, 64)}, 300)


class Graphs:
    """Fake graphs; a capture of the kind and number of tokens in `failing` raises `failure`."""

    failing, failure = (PLAIN, 0), RuntimeError("operation not permitted when stream is capturing")

    def __init__(self, *_: Any) -> None:
        self.sizes: dict[GraphKind, list[int]] = {}

    def capture(self, kind: GraphKind, sizes: list[int], report: Any) -> None:
        self.sizes[kind] = []
        for size in sorted(sizes, reverse=True):
            report(f"capturing CUDA graphs{kind}", 0.5)
            if (kind, size) == self.failing:
                raise self.failure
            self.sizes[kind].insert(0, size)

    def drop(self, kind: GraphKind) -> None:
        self.sizes.pop(kind, None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(free=[1_000], problem=None)
    monkeypatch.setattr(graph_loading, "StepGraphs", Graphs)
    monkeypatch.setattr(graph_loading, "find_problem", lambda *_: state.problem)
    monkeypatch.setattr(graph_loading, "free_memory", lambda _: state.free.pop(0) if len(state.free) > 1 else 1_000)
    return state


def loading(adapters: Any = None) -> GraphLoader:
    runner: Any = SimpleNamespace(attention=SimpleNamespace(cache=SimpleNamespace(device=CPU)))
    return GraphLoader(runner, PagedKernel(CPU), GEOMETRY, TapeRecorder, adapters)


def test_graphs_are_captured_and_told(machine: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    told: list[str] = []
    graphs = loading().load(INFO, lambda what, share: told.append(what))
    assert graphs is not None
    assert graphs.sizes == {PLAIN: [1, 2, 4, 8]}  # type: ignore[attr-defined]
    assert told == ["capturing CUDA graphs"] * 4
    assert "captured 4 CUDA graphs of up to 8 tokens" in caplog.text


@pytest.mark.parametrize("failure", [RuntimeError("the stream is capturing"), torch.OutOfMemoryError("no memory")])
def test_a_capture_that_fails_leaves_steps_as_they_are(
    machine: SimpleNamespace,
    failure: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Graphs, "failing", (PLAIN, 2))
    monkeypatch.setattr(Graphs, "failure", failure)
    assert loading().load(INFO) is None
    assert f"without CUDA graphs: {type(failure).__name__}: {failure}" in caplog.text
    machine.free = [100, 60, 50]
    assert loading().measure(replace_tokens(2)) == 0, "what will not be there takes nothing"


def test_a_graph_that_is_wrong_is_not_used(machine: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    machine.problem = "the one of 8 tokens gives other logits"
    assert loading().load(INFO) is None
    assert machine.problem in caplog.text


def replace_tokens(num_tokens: int) -> ExecutorInfo:
    return ExecutorInfo("m", 300, 64, 32, BLOCK, max_num_batched_tokens=num_tokens)


def test_two_graphs_tell_what_all_take(machine: SimpleNamespace) -> None:
    machine.free = [1_000, 700, 690, 1_000]
    assert loading().measure(INFO) == 300 + 3 * 10
    machine.free = [1_000, 700, 1_000]
    assert loading().measure(replace_tokens(1)) == 300


def test_graphs_with_adapters_are_counted_with_the_others(machine: SimpleNamespace) -> None:
    machine.free = [1_000, 700, 690, 690, 600, 595, 1_000]
    assert loading(SimpleNamespace()).measure(INFO) == 300 + 3 * 10 + 90 + 3 * 5


def test_graphs_with_adapters_that_cannot_be_take_nothing(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graphs, "failing", (GraphKind(has_adapters=True), 8))
    machine.free = [1_000, 700, 690, 690, 1_000]
    assert loading(SimpleNamespace()).measure(INFO) == 300 + 3 * 10


def test_graphs_with_long_chunks_are_counted_with_the_others(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is counted for graphs with and without long chunks; a graph that cannot be captured counts nothing."""
    free, own = [1_000, 700, 690, 690, 640, 630, 1_000], len(PLAIN.sizes(96)) - 1
    machine.free = [*free]
    assert loading().measure(replace_tokens(96)) == 300 + own * 10 + 50 + 10
    monkeypatch.setattr(Graphs, "failing", (LONG, 64))
    machine.free = [*free]
    assert loading().measure(replace_tokens(96)) == 300 + own * 10


@pytest.mark.parametrize("size", [64, 96])
def test_where_long_chunks_cannot_be_captured_other_steps_can(
    machine: SimpleNamespace, size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Graphs, "failing", (LONG, size))
    graphs = loading().load(replace_tokens(96))
    assert isinstance(graphs, Graphs)
    assert set(graphs.sizes) == {PLAIN}
    assert f"steps with long chunks run without CUDA graphs: RuntimeError: {Graphs.failure}" in caplog.text


def test_adapters_have_graphs_unless_none_can_come() -> None:
    cache = SimpleNamespace(device=torch.device("cuda"))
    runner: Any = SimpleNamespace(attention=SimpleNamespace(cache=cache, kernel=PagedKernel(CPU)))
    adapters: Any = SimpleNamespace()
    for reserved, wanted in ((None, adapters), (1 << 20, adapters), (0, None)):
        made = graph_loader(ModelConfig(reserved_memory=reserved), runner, GEOMETRY, adapters)
        assert made is not None
        assert made._adapters is wanted


@pytest.mark.parametrize(
    ("settings", "kernel", "width", "reason"),
    [
        ({"enforce_eager": True}, PagedKernel, 64, None),
        ({}, CpuKernel, 64, "they need kernel 'paged', not 'cpu'"),
        ({}, PagedKernel, 320, "heads up to 256 wide"),
    ],
)
def test_where_there_are_none(
    settings: dict[str, Any], kernel: Any, width: int, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cache = SimpleNamespace(device=torch.device("cuda"))
    runner: Any = SimpleNamespace(attention=SimpleNamespace(cache=cache, kernel=_made(kernel)))
    geometry = Geometry({0: LayerGeometry(4, 2, width, width)}, 300)
    assert graph_loader(ModelConfig(**settings), runner, geometry) is None
    assert reason in caplog.text if reason else not caplog.text
    cache.device = CPU
    assert graph_loader(ModelConfig(), runner, GEOMETRY) is None


def _made(kernel: Any) -> Any:
    return kernel(CPU) if kernel is PagedKernel else kernel()


def test_a_part_of_a_model_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SimpleNamespace(device=torch.device("cuda"))
    runner: Any = SimpleNamespace(attention=SimpleNamespace(cache=cache, kernel=PagedKernel(CPU)))
    monkeypatch.setattr(tensor_parallel, "num_ranks", lambda: 2)
    assert graph_loader(ModelConfig(), runner, GEOMETRY) is not None


def test_a_rank_that_lacks_memory_ends_and_does_not_go_another_way(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without memory for graphs ends with an error, as the other ranks would otherwise wait for its sums."""
    monkeypatch.setattr(tensor_parallel, "num_ranks", lambda: 2)
    monkeypatch.setattr(Graphs, "failing", (PLAIN, 2))
    assert loading().load(INFO) is None, "what all ranks find, they find alike"
    monkeypatch.setattr(Graphs, "failure", torch.OutOfMemoryError("no memory"))
    for ask in (loading().load, loading().measure):
        with pytest.raises(torch.OutOfMemoryError):
            ask(replace_tokens(2))


class OneRankFails(Graphs):
    """Fake graphs that raise an error in rank 1 when a graph with a long chunk is captured."""

    def capture(self, kind: GraphKind, sizes: list[int], report: Any) -> None:
        def record(work: Any) -> Any:
            if kind.has_long and dist.get_rank() == 1:
                raise RuntimeError("its driver refuses")
            return work

        own: Any = SimpleNamespace(_recorder=SimpleNamespace(record=record), _cache=SimpleNamespace(device=CPU))
        for _ in sizes:
            StepGraphs._recorded(own, lambda: None)
        super().capture(kind, sizes, report)


def test_of_ranks_all_have_graphs_of_a_kind_or_none_has(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If one rank cannot capture a kind of graphs, no rank uses that kind, as the ranks would wait for each other."""
    monkeypatch.setattr(graph_loading, "StepGraphs", OneRankFails)
    ranks = Ranks(2).run(lambda rank: loading().load(replace_tokens(96)))
    assert [set(graphs.sizes) for graphs in ranks if isinstance(graphs, Graphs)] == [{PLAIN}, {PLAIN}]
    for reason in ("RuntimeError: its driver refuses", "InternalError: another rank cannot capture it"):
        assert f"steps with long chunks run without CUDA graphs: {reason}" in caplog.text


# -- the properties
# --------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_properties_hold_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout", "900"]
    command = [sys.executable, "-m", "pytest", *options, "tests/model/graph_properties.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
