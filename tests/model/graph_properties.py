"""Tests of properties of steps in graphs, with `tape` in place of CUDA graphs and kernels in Triton's interpreter.

`test_graphs.py` runs this file in a process of its own, where TRITON_INTERPRET is set before anything imports
Triton."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder as Builder

from bridle.config import ModelConfig
from bridle.engine.scheduling.step_plan import PlanRow
from bridle.lora.fused import TiledProduct, is_interpreted
from bridle.model import adapter_tiles, loader
from bridle.model.batch_inputs import pack_step
from bridle.model.block_copies import BlockCopier, find_problem
from bridle.model.executor import LocalExecutor
from bridle.model.fused_step import FusedStep
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.graph_kinds import KINDS, GraphKind
from bridle.model.graph_loading import GraphLoader
from bridle.model.graphs import StepGraphs
from bridle.model.kernels import paged
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.rows import RowsKernel, Scratch, StepShape
from bridle.model.kv_cache import KVCache
from bridle.model.loading import load_executor
from bridle.model.sequence_state import CachedRequestState
from bridle.model.static_step import StaticStep, StepCapacity
from tests.fakes import tiny_checkpoints
from tests.model.addresses import check_owned, watched
from tests.model.attention_pool import CPU, Pool, attend, layer_options
from tests.model.loaded_adapters import Loaded, all_logits, load_late
from tests.model.oracle import _oracle, check_run, run
from tests.model.paged_properties import dot_by_rows, grown, large_pools
from tests.model.tape import TapedKernels, TapeRecorder

assert is_interpreted(), "run this with TRITON_INTERPRET=1"

# What was not written is not a number, so that nobody can rely on it.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True

BLOCK, NUM_BLOCKS = 4, 64
LONG = GraphKind(has_long=True)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small sizes, so that short contexts are split, and a few tokens make a long chunk of several tiles."""
    monkeypatch.setattr(paged, "CHUNK", 16)
    monkeypatch.setattr(paged, "MAX_SHORT", 4)
    monkeypatch.setattr(paged, "TILE", 16)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    """Return a recorder of graphs; models that the test loads use it for their steps."""
    tape = TapeRecorder()

    def graph_loader(config: ModelConfig, runner: Any, geometry: Any, adapters: Any) -> GraphLoader | None:
        if config.enforce_eager:
            return None
        kernel, fused = runner.attention.kernel, None if runner.lowered is None else runner.lowered.fused
        for each in (kernel, fused):
            if each is not None:
                each.__dict__["kernels"] = TapedKernels(each.kernels)
        if not config.reserved_memory:
            return GraphLoader(runner, kernel, geometry, lambda: tape)
        machine = adapters._kernel.fused.machine
        machine.__dict__["kernels"] = TapedKernels(machine.kernels)
        return GraphLoader(runner, kernel, geometry, lambda: tape, adapters)

    monkeypatch.setattr(loader, "graph_loader", graph_loader)
    monkeypatch.setattr(loader, "use_kernels", lambda *_: None)  # a tape does not hear them
    return tape


def loaded(family: str, **settings: Any) -> LocalExecutor:
    given = {
        "dtype": "float32",
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK,
        "step_tokens": 16,
        "step_seqs": 8,
        "warm_up": False,
        "reserved_memory": 0,
    }
    config = ModelConfig(str(tiny_checkpoints.cached_checkpoint(family)), kernel="paged", **{**given, **settings})
    executor = load_executor(config)
    assert isinstance(executor, LocalExecutor)
    return executor


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_each_graph_gives_what_the_step_gives_without(family: str, recorder: TapeRecorder) -> None:
    """Loading captures and compares a graph for each size: dense families use fused layers, others transformers'
    layers."""
    graphs = loaded(family).runner.graphs
    assert isinstance(graphs, StepGraphs)
    assert graphs.sizes_of(GraphKind()) == [1, 2, 4, 8, 16]
    assert graphs.sizes_of(LONG) == [8, 16]
    assert recorder.num_replays == 7, "one for each"


def mirrors_of(chunks: list[tuple[int, int]], rng: random.Random) -> tuple[list[PlanRow], list[CachedRequestState]]:
    """Return sequences with the given numbers of computed and new tokens, in scattered blocks."""
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    plans, mirrors = [], []
    for number, (before, length) in enumerate(chunks):
        mirror = CachedRequestState()
        mirror.tokens = [rng.randrange(200) for _ in range(before + length)]
        mirror.add_blocks(free.pop() for _ in range(-(-(before + length) // BLOCK)))
        plans.append(PlanRow(number, before, length, min(length, 2)))
        mirrors.append(mirror)
    return plans, mirrors


#: Chunks of steps: tokens before, tokens now. Each step's tokens fill one of the graphs; chunks of 5 or more are long.
STEPS = [
    [(0, 1)],
    [(30, 1), (3, 1)],
    [(17, 1), (0, 3), (40, 4)],
    [(0, 1), (7, 4), (20, 4), (33, 1), (15, 2), (16, 4)],
    [(0, 8)],
    [(21, 5), (40, 1), (3, 2)],
    [(0, 5), (17, 5), (30, 1), (2, 5)],
    [(35, 16)],
    [(9, 1), (20, 10), (0, 4), (31, 1)],
]


@patch.object(Builder, "create_dot", dot_by_rows)
@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_a_replay_is_bitwise_the_step_of_the_same_size(family: str, recorder: TapeRecorder) -> None:
    """The replay's logits, hidden states and cache equal those of the step bit for bit, whatever the graph's memory
    held."""
    runner = loaded(family).runner
    for number, chunks in enumerate((*STEPS, *STEPS[3:6])):
        plans, mirrors = mirrors_of(chunks, random.Random(number))
        found = []
        for packer in (None, runner.graphs):
            cache = runner.attention.cache
            cache.clear(NUM_BLOCKS)
            for length in sorted({plan.start for plan in plans} - {0}):  # what is there before the step
                before = [PlanRow(n, 0, length) for n, plan in enumerate(plans) if plan.start == length]
                with_them = [mirrors[row.seq_id] for row in before]
                runner.run(pack_step(before, with_them, BLOCK, cache.device, runner.attention.kernel.words))
            step = pack_step(plans, mirrors, BLOCK, cache.device, runner.attention.kernel.words, packer)
            assert (step.replay is None) is (packer is None)
            logits = runner.run(step).clone()
            parts = [part[: NUM_BLOCKS * BLOCK].clone() for layer in cache.layers.values() for part in layer.parts]
            assert runner.hidden is not None
            found.append([logits, runner.hidden.clone(), *parts])
        assert all(torch.equal(eager, graph) for eager, graph in zip(*found, strict=True))


def test_what_fits_into_no_graph_is_computed_as_ever(recorder: TapeRecorder) -> None:
    """Steps without a graph have more tokens than any graph, or more rows of logits than a graph has sequences."""
    runner = loaded("llama").runner
    for chunks, num_logits, has_graph in (
        ([(0, 5)], 1, True),
        ([(0, 16)], 8, True),
        ([(0, 16)], 9, False),
        ([(0, 17)], 1, False),
        ([(0, 5), (0, 1), (9, 10)], 1, True),
        ([(0, 5), (0, 2), (9, 10)], 1, False),
    ):
        plans, mirrors = mirrors_of(chunks, random.Random(1))
        plans[0] = replace(plans[0], num_logits=num_logits)
        step = pack_step(plans, mirrors, BLOCK, CPU, runner.attention.kernel.words, runner.graphs)
        assert (step.replay is not None) is has_graph, chunks


#: Long chunks, of up to three tiles.
CHUNKS = st.lists(st.tuples(st.integers(0, 60), st.integers(5, 40)), max_size=2)
SHORT = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 4)), min_size=1, max_size=3)


@patch.object(Builder, "create_dot", dot_by_rows)
@settings(max_examples=10)
@given(pool=large_pools(), short=SHORT, long=CHUNKS, num_missing=st.integers(0, 5), data=st.data())
def test_attention_is_bitwise_that_of_the_step_without(
    pool: Pool, short: list[tuple[int, int]], long: list[tuple[int, int]], num_missing: int, data: st.DataObject
) -> None:
    """Attention in a graph equals attention without one for short and long chunks in any order; no program leaves its
    tensors."""
    chunks = data.draw(st.permutations([*short, *long]))
    options, spare = data.draw(layer_options(pool.shape.num_heads)), pool.free.pop()
    step, query = grown(pool, chunks)
    want = attend(PagedKernel(CPU), pool, step, query, options)
    kernel, num_tokens = PagedKernel(CPU), step.num_tokens
    kernel.seats.reserve(len(chunks) + 1, 100)
    kernel.make_tables(CPU)
    shape, room = StepShape(num_tokens + num_missing, 1, data.draw(st.integers(len(long), 3))), 100
    static = StaticStep(kernel, StepCapacity(shape, room), pool.block_size, spare, CPU)
    positions, slots = step.position_ids[0].tolist(), step.slots.tolist()
    assert static.write(shape, [0] * num_tokens, positions, slots, [], step.rows)
    heads = pool.draw(num_missing, pool.shape.num_kv_heads, pool.shape.key_dim)
    values = pool.draw(num_missing, pool.shape.num_kv_heads, pool.shape.value_dim)
    pool.layer.write(static.view(shape).slots[num_tokens:], heads, values)
    scratch = Scratch(room, Geometry({0: pool.shape}, 2), CPU)
    rows = RowsKernel(kernel, static.numbers(shape), scratch)
    wide = torch.cat([query, pool.draw(num_missing, *query.shape[1:])])
    with watched() as touched:
        rows.begin(step)
        have = rows.attend(wide, pool.layer, options)
    assert torch.equal(have[:num_tokens], want)
    assert kernel.tables is not None
    held = [wide, have, static.words, kernel.tables, pool.layer.keys, pool.layer.values, *scratch.parts()]
    check_owned(touched, held if options.sinks is None else [*held, options.sinks])


# -- copies ----------------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(seed=st.integers(0, 99), num_pairs=st.integers(1, 5))
def test_one_launch_copies_what_torch_copies_one_by_one(seed: int, num_pairs: int) -> None:
    """One launch copies a block in every layer and changes no other block, also if a block is the source of two
    copies."""
    rng = random.Random(seed)
    targets = rng.sample(range(12), num_pairs)
    sources = rng.choices(sorted({*range(12)} - {*targets}), k=num_pairs)
    geometry = Geometry({0: LayerGeometry(4, 2, 16, 16), 1: LayerGeometry(8, 4, 64, 32)}, 2)
    caches = [KVCache(geometry, 12, BLOCK, torch.bfloat16, CPU, copier) for copier in (None, BlockCopier(CPU))]
    for number, layer in caches[0].layers.items():
        for part, other in zip(layer.parts, caches[1].layers[number].parts, strict=True):
            other.copy_(part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed))))
    for cache in caches:
        with watched() as touched:
            cache.copy_blocks([*zip(sources, targets, strict=True)])
    assert touched, "by the kernel"
    parts = [[part for layer in cache.layers.values() for part in layer.parts] for cache in caches]
    assert all(map(torch.equal, *parts))


def test_the_copier_passes_its_trial() -> None:
    assert find_problem(BlockCopier(CPU), CPU) is None


# -- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
def test_every_token_of_a_run_with_graphs_is_the_oracles(
    is_late: bool, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests have forks, rewinds, forced tokens, masks and preemption. Some steps are launched before the tokens of
    the last step are known. Then the sampler writes these tokens into the graph's memory itself."""
    monkeypatch.setattr(paged, "MAX_SHORT", 8)  # with long chunks in graphs of 16 tokens
    path = tiny_checkpoints.cached_checkpoint("llama")

    made: list[Any] = []

    def load(config: ModelConfig) -> Any:
        own = replace(config, kernel="paged", step_tokens=16, warm_up=False, reserved_memory=0)
        made.append(load_late(own) if is_late else load_executor(own))
        return made[-1]

    check_run(_oracle("llama", path), *run(path, random.Random(5), 300, load))
    assert recorder.num_replays > 15, "beyond one for each graph that was tried"
    assert not is_late or made[0].num_named > 5


# -- what is found -----------------------------------------------------------------------------------------------


def test_a_number_that_is_baked_in_is_found(
    recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The self-test of graphs must find slots that the host knew at capture and that the graph therefore repeats."""
    honest = FusedStep.turn

    def baking(self: FusedStep, layer: Any, mixed: Any, turn: Any, attend: Any) -> torch.Tensor:
        step = attend.step
        attend.step = type(step)(**{**_fields(step), "slots": torch.from_numpy(step.slots.numpy().copy())})
        query = honest(self, layer, mixed, turn, attend)
        attend.step = step
        return query

    monkeypatch.setattr(FusedStep, "turn", baking)
    assert loaded("llama").runner.graphs is None
    assert "without CUDA graphs: the one of 1 tokens gives other logits" in caplog.text


def _fields(step: Any) -> dict[str, Any]:
    return {name: getattr(step, name) for name in step.__slots__}


def test_a_wait_is_found(
    recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = FusedStep.gate

    def waiting(self: FusedStep, layer: Any, mixed: torch.Tensor) -> torch.Tensor:
        assert mixed.isfinite().all()
        return honest(self, layer, mixed)

    monkeypatch.setattr(FusedStep, "gate", waiting)
    assert loaded("llama").runner.graphs is None
    assert "without CUDA graphs: RuntimeError:" in caplog.text
    assert "cannot be captured" in caplog.text


def test_nobody_has_to_have_them(recorder: TapeRecorder) -> None:
    assert loaded("llama", enforce_eager=True).runner.graphs is None
    assert recorder.num_replays == 0


# -- adapters ----------------------------------------------------------------------------------------------------------


def with_adapters(family: str, folder: Path) -> Loaded:
    settings = {"num_blocks": NUM_BLOCKS, "step_tokens": 16, "step_seqs": 8, "warm_up": False}
    made = Loaded(family, folder, kernel="paged", adapter_kernel="fused", reserved_memory=1 << 20, **settings)
    made.place_all()
    return made


#: Prompts of a step, each with the number of its adapter: each of several graphs, and tiles that others had before.
MIXED: list[list[tuple[int, str | None]]] = [
    [(1, "1")],
    [(1, None), (1, "0")],
    [(4, "0"), (3, None), (2, "1"), (1, "1"), (4, "2"), (1, "0")],
    [(1, "2"), (1, None), (1, "2"), (1, "0"), (1, "1"), (2, None)],
    [(1, "1"), (5, "2"), (1, None)],
    [(7, None), (1, "1")],
    [(3, None), (4, "1")],
    [(1, "0")],
]


@patch.object(Builder, "create_dot", dot_by_rows)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_with_adapters_are_in_graphs_as_they_are_without(
    family: str, recorder: TapeRecorder, tmp_path: Path
) -> None:
    """Results equal PEFT's, and rows without an adapter keep the same bits, also after adapters left the device and
    returned to other addresses."""
    made = with_adapters(family, tmp_path)
    executor, adapters = made.executor, made.executor.adapters
    assert adapters is not None
    graphs = executor.runner.graphs
    assert isinstance(graphs, StepGraphs)
    assert [graphs.sizes_of(kind) for kind in KINDS] == [[1, 2, 4, 8, 16], [8, 16]] * 2
    first: list[list[torch.Tensor]] = []
    kept = []  # what keeps memory from being used again
    for turn in range(2):
        for number, rows in enumerate(MIXED):
            prompts = [[(7 * i + 3 * place) % 250 + 10 for i in range(size)] for place, (size, _) in enumerate(rows)]
            keys = [key for _, key in rows]
            before = recorder.num_replays
            have = [each.clone() for each in all_logits(executor, prompts, keys)]
            assert recorder.num_replays == before + 1
            executor.runner.graphs = None
            eager = all_logits(executor, prompts, keys)
            executor.runner.graphs = graphs
            for prompt, key, graph, plain in zip(prompts, keys, have, eager, strict=True):
                assert torch.equal(graph, plain) if key is None else (graph - plain).abs().max() < 1e-4
                assert (graph - made.oracle.logits(prompt, key)).abs().max() < 1e-3
            if turn:
                assert all(torch.equal(old, new) for old, new in zip(first[number], have, strict=True))
            first.append(have)
        for key in ("0", "1", "2"):
            kept.append(adapters.on_device[key])
            adapters.displace(key)
        for key in ("2", "0", "1"):
            adapters.place(key)
    made.close()


def test_larger_ranks_than_a_graph_has_go_without(
    recorder: TapeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_tiles, "MOST_RANKS", 8)
    made = with_adapters("llama", tmp_path)
    for key, num_replays in (("0", 1), ("1", 0), ("2", 1), (None, 1)):
        before = recorder.num_replays
        (have,) = all_logits(made.executor, [[20, 30, 40]], [key])
        assert recorder.num_replays == before + num_replays, key
        assert (have - made.oracle.logits([20, 30, 40], key)).abs().max() < 1e-3
    made.close()


def test_nothing_is_captured_for_adapters_that_cannot_come(recorder: TapeRecorder) -> None:
    graphs = loaded("llama").runner.graphs
    assert isinstance(graphs, StepGraphs)
    assert [bool(graphs.sizes_of(kind)) for kind in KINDS] == [True, True, False, False]


def test_where_adapters_cannot_be_captured_other_steps_can(
    recorder: TapeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = TiledProduct.add

    def waiting(self: TiledProduct, site: int, out: torch.Tensor, rows: torch.Tensor) -> None:
        assert rows.isfinite().all()
        honest(self, site, out, rows)

    monkeypatch.setattr(TiledProduct, "add", waiting)
    made = with_adapters("llama", tmp_path)
    graphs = made.executor.runner.graphs
    assert isinstance(graphs, StepGraphs)
    assert [bool(graphs.sizes_of(kind)) for kind in KINDS] == [True, True, False, False]
    assert "steps with adapters run without CUDA graphs: RuntimeError:" in caplog.text
    before = recorder.num_replays
    for key in ("1", None):
        (have,) = all_logits(made.executor, [[20, 30, 40]], [key])
        assert (have - made.oracle.logits([20, 30, 40], key)).abs().max() < 1e-3
    assert recorder.num_replays == before + 1
    made.close()


def test_tiles_that_are_baked_in_are_found(
    recorder: TapeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The self-test of graphs must find adapter tiles that were known at capture and that the graph therefore
    repeats."""
    honest = TiledProduct.add

    def baking(self: TiledProduct, site: int, out: torch.Tensor, rows: torch.Tensor) -> None:
        at_first, self.tiles = self.tiles, torch.from_numpy(self.tiles.numpy().copy())
        honest(self, site, out, rows)
        self.tiles = at_first

    monkeypatch.setattr(TiledProduct, "add", baking)
    made = with_adapters("llama", tmp_path)
    graphs = made.executor.runner.graphs
    assert isinstance(graphs, StepGraphs)
    assert [bool(graphs.sizes_of(kind)) for kind in KINDS] == [True, True, False, False]
    assert "steps with adapters run without CUDA graphs: the one of 1 tokens gives other logits" in caplog.text
    made.close()
