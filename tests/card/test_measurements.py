"""The parts of the validation of a GPU in their tiny form, on a CPU. Their code runs, and a failure or a fallback is
reported as a failure."""

from __future__ import annotations

import logging
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bridle.bench.baselines import EnginePeer
from bridle.errors import OutOfBlocks
from bridle.model.batch_inputs import PackedStep, pack_step
from bridle.model.executor import LocalExecutor
from scripts.card import attention, child, programs, serving, smoke, sound, steering, wasm
from scripts.card.models import SHAPES, make_executor, settings_of, token_bytes_of
from scripts.card.parts import DEEP, FIRST
from scripts.card.probe import Rates
from scripts.card.speed import WARM_UP, BareLoop, Race, prompt_joins
from tests.sources import ROOT

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.bench.roofline.bench_device", lambda: CPU)


def measured(part: str, folder: Path = ROOT, seconds: float = 600.0) -> list[dict[str, Any]]:
    """What a part tells."""
    found: list[dict[str, Any]] = []
    child.measure(child.Bench(part, True, seconds, folder), found.append)
    return found


def failures(figures: list[dict[str, Any]]) -> list[str]:
    return [figure[key] for figure in figures for key in ("error", "failed") if figure.get(key)]


@pytest.mark.parametrize(
    ("part", "count"),
    [
        ("smoke", 4),
        ("load", 2),
        ("attention", 2),
        ("8b", 6),
        ("lora", 2),
        ("control", 8),
        ("sanitizer", 1),
        ("counters", 1),
    ],
)
def test_a_part_runs(part: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs.shutil, "which", lambda name: None)
    figures = measured(part)
    assert not failures(figures)
    assert len([figure for figure in figures if figure.get("what") != "nvidia-smi"]) == count
    for figure in figures:
        assert not figure.get("tokens_per_second", 1) <= 0
    for figure in figures:
        if "over_bare_loop" in figure:
            assert figure["floor_share"] == pytest.approx(figure["floor_ms"] / figure["step_ms"])
            assert figure["over_bare_loop"] == pytest.approx(figure["bare_step_ms"] / figure["step_ms"])


def test_every_part_has_work() -> None:
    assert {part.name for part in (*FIRST, *DEEP)} == set(child.WORK)


@pytest.mark.slow  # the parts above run without other programs
@pytest.mark.parametrize(
    ("part", "count"),
    [("laws", 1), ("serve", 2), ("peers", 8)],
)
def test_a_part_with_other_programs_runs(part: str, count: int, tmp_path: Path) -> None:
    figures = measured(part, tmp_path)
    assert not failures(figures)
    assert len(figures) == count
    if part == "serve":
        offline, http = figures
        assert http["ratio"] == pytest.approx(http["tokens_per_second"] / offline["tokens_per_second"])
        assert http["failed_requests"] == 0
        assert http["gap_p99_ms"] >= http["gap_p50_ms"] > 0
    if part == "peers":
        assert {figure["peer"] for figure in figures} == {"generate", "generate_batch"}


def test_what_fails_or_falls_back_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: child.Bench) -> Iterator[dict[str, Any]]:
        yield {"what": "something"}
        logging.getLogger("bridle.model.graph_loading").warning("steps run without CUDA graphs: %s", "a wait")
        raise RuntimeError("an illegal access")

    monkeypatch.setitem(child.WORK, "8b", broken)
    assert measured("8b") == [
        {"what": "something"},
        {"what": "warning", "failed": "steps run without CUDA graphs: a wait"},
        {"error": "RuntimeError: an illegal access"},
    ]


def test_on_a_gpu_everything_has_kernels_and_graphs() -> None:
    executor = make_executor("toy", CPU, torch.float32, num_tokens=256, num_seqs=2)[0]
    graphs = SimpleNamespace(sizes_of=lambda kind: [] if kind.has_adapters else [64])
    runner = SimpleNamespace(attention=executor.runner.attention, graphs=graphs, lowered=None)
    on_gpu = SimpleNamespace(runner=runner, sampler=executor.sampler, info=replace(executor.info, device="cuda"))
    told = smoke.ways(on_gpu)  # type: ignore[arg-type]
    assert told["failed"] == (
        "fell back: attention, prompts, layers, sampler, graphs with adapters, graphs with long chunks and adapters"
    )
    assert told["graphs"] and told["graphs with long chunks"]
    assert smoke.ways(executor)["failed"] is None, "a CPU has none of them"
    executor.close()


def test_steps_with_adapters_have_graphs_as_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs, the ratio of both speeds would say nothing about the adapters."""
    executor = make_executor("toy", CPU, torch.float32, num_tokens=4_096, num_seqs=2)[0]
    monkeypatch.setattr(steering, "lacks_graphs", lambda executor: True)
    plain, adapted = steering.adapt(executor, 2, 2, [steering.Mix("q and v", 1)], lambda: True)
    assert "failed" not in plain
    assert adapted["failed"] == "steps with adapters run without CUDA graphs"
    executor.close()


def test_a_part_begins_nothing_once_its_time_is_over() -> None:
    assert measured("control", seconds=0.0) == []


def test_without_a_gpu_only_a_toy_runs() -> None:
    with pytest.raises(SystemExit, match="there is no GPU here; --quick"):
        child.measure(child.Bench("control", False, 60.0, ROOT), lambda figure: None)


class FakeGraphs:
    """Fake graphs of one size: token ids stay at one address, where a replay reads them."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.runner, self.size = executor.runner, executor.info.block_size
        self.ids = torch.zeros(1, 4, dtype=torch.int64)
        self.num_replays = 0

    def takes(self, plan_rows: Any) -> bool:
        return True

    def pack(self, plan_rows: Any, ids: Any, positions: Any, slots: Any, logits: Any, rows: Any) -> PackedStep:
        step = pack_step(plan_rows, [row.mirror for row in rows], self.size, CPU)
        self.ids[0, : len(ids)] = torch.tensor(ids)
        return replace(step, input_ids=self.ids, replay=partial(self.replay, step))

    def replay(self, step: PackedStep) -> tuple[Tensor, None]:
        self.num_replays += 1
        step.input_ids = self.ids[:, : step.num_tokens].clone()
        return self.runner.run(step), None


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_bare_loop_draws_what_the_engine_draws(has_graphs: bool) -> None:
    executor, sizes = make_executor("toy", CPU, torch.float32, num_tokens=256, num_seqs=2)
    assert sizes.token_bytes == token_bytes_of("toy", torch.float32)
    executor.runner.attention.cache.clear(executor.info.num_blocks)
    graphs = FakeGraphs(executor)
    executor.runner.graphs = graphs if has_graphs else None
    loop = BareLoop(executor)
    drawn = loop.run(2, 0, 5).outputs
    assert loop.has_graph == has_graphs
    assert graphs.num_replays == (WARM_UP + 5 if has_graphs else 0)
    executor.runner.graphs = None
    peer = EnginePeer(executor)
    wanted = peer.generate([[3], [3]], WARM_UP + 5).outputs
    peer.close()
    assert drawn == [output[WARM_UP:] for output in wanted]


def test_a_step_that_a_prompt_joins_has_a_graph_as_others() -> None:
    """On a GPU, a step without a graph would be dominated by the time of its launches."""
    executor, _ = make_executor("toy", CPU, torch.float32, num_tokens=256, num_seqs=2)
    loop, plan = BareLoop(executor), Race("toy", (1, 2), (16,), ((1, 8),), 2, 2, 256)
    assert prompt_joins(loop, plan)["failed"] is None
    loop.on_gpu = True
    told = prompt_joins(loop, plan)
    assert told["failed"] == "a step with a prompt runs without CUDA graphs"
    assert (told["batch"], told["context"], told["tokens"]) == (2, 16, 8)
    executor.close()


class FlashInfer:
    """FlashInfer's interface for decoding, in plain torch."""

    def __init__(self, workspace: Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert layout == "NHD"

    def plan(self, starts: Tensor, pages: Tensor, lasts: Tensor, *sizes: int, **dtypes: torch.dtype) -> None:
        self.starts, self.pages, self.lasts = starts.tolist(), pages.long(), lasts.tolist()
        self.num_heads, self.kv_heads, self.dim, self.page = sizes

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        rows = []
        for number, row in enumerate(query):
            pages = self.pages[self.starts[number] : self.starts[number + 1]]
            length = (len(pages) - 1) * self.page + self.lasts[number]
            keys, values = (part[pages].flatten(0, 1)[:length].transpose(0, 1) for part in cache)
            heads = row.view(self.kv_heads, -1, self.dim)
            rows.append(scaled_dot_product_attention(heads, keys, values).reshape(self.num_heads, self.dim))
        return torch.stack(rows)


def attended(monkeypatch: pytest.MonkeyPatch, wrapper: Any) -> list[dict[str, Any]]:
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    module = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)  # type: ignore[arg-type]
    scenes = [attention.AttentionScene("toy", *size) for size in ((3, 40), (1, 7))]
    return list(attention.attention(scenes, CPU, torch.float32, Rates(1e9, 1e9), lambda: True))


def test_attention_is_measured_beside_flashinfers_over_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attended(monkeypatch, FlashInfer)
    assert [figure["peer"] for figure in found] == ["bridle", "flashinfer"] * 2
    for figure in found[1::2]:
        assert figure["max_difference"] < 1e-5


def test_where_flashinfer_fails_it_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_settings: Any) -> None:
        raise RuntimeError("no nvcc")

    found = attended(monkeypatch, broken)
    assert [figure["peer"] for figure in found] == ["bridle", "flashinfer", "bridle"]
    assert found[1]["left_out"] == "RuntimeError: no nvcc"


def test_a_server_without_its_packages_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert measured("serve") == [{"what": "serve", "failed": "the server needs uvicorn"}]


def test_wasm_controllers_without_their_packages_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing packages are reported as a failure, and the part is not left out."""
    monkeypatch.setattr(wasm, "find_spec", lambda name: None)
    executor: Any = None
    assert list(wasm.steer(executor, 4, 6, 1.0, lambda: True)) == [
        {"what": "Wasm controllers", "failed": "Wasm controllers need posix_ipc, wasmtime"}
    ]


def test_the_server_needs_nothing_that_bridle_does_not_require() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(serving.NEEDED) <= {Requirement(line).name for line in project["dependencies"]}


def test_hardware_counters_are_read_from_the_profilers_table() -> None:
    text = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","attend_works","gpu__time_duration.sum","ns","12,345"
"0","attend_works","launch__registers_per_thread","register/thread","160"
"1","join_parts","gpu__time_duration.sum","ns","2,000"
"""
    assert programs.read_counters(text) == [
        {"what": "counters", "kernel": "attend_works", "nanoseconds": 12345.0, "registers": 160.0},
        {"what": "counters", "kernel": "join_parts", "nanoseconds": 2000.0},
    ]


def test_a_lost_device_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    assert sound.is_sound()
    for name, answer in (("is_available", lambda: True), ("is_initialized", lambda: True), ("synchronize", lost)):
        monkeypatch.setattr(torch.cuda, name, answer)
    assert not sound.is_sound()


def test_scenes_are_those_with_room() -> None:
    plan = Race("toy", (1, 64), (16, 256), ((1, 8),), 4, 2, 10_000)
    assert plan.scenes() == [(1, 16), (64, 16), (1, 256)]
    assert 64 * 16 < plan.num_tokens <= 10_000
    with pytest.raises(OutOfBlocks, match="room for 20 tokens"):
        _ = Race("toy", (64,), (16,), ((1, 8),), 4, 2, 20).num_tokens


def test_sizes_are_those_of_the_models() -> None:
    parameters = {}
    for name in ("0.6b", "8b"):
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            parameters[name] = sum(p.numel() for p in AutoModelForCausalLM.from_config(settings_of(name)).parameters())
    assert {name: round(count / 1e8) for name, count in parameters.items()} == {"0.6b": 6, "8b": 82}
    assert SHAPES["0.6b"]["vocab_size"] == 151_936
