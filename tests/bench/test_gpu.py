"""`bridle bench gpu` in its tiny form: its code runs, its lines come at once, and what fails spoils nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bridle.bench import BenchSettings, gpu, gpu_attention, gpu_serving, run
from bridle.bench.baselines import EnginePeer
from bridle.bench.gpu_models import SHAPES, make_executor, token_bytes_of
from bridle.bench.gpu_probe import Rates
from bridle.bench.gpu_speed import WARM_UP, BareLoop, Race
from bridle.errors import InvalidRequest, OutOfBlocks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.bench.roofline.bench_device", lambda: CPU)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / gpu.FILE_NAME).read_text().splitlines()]


@pytest.mark.slow  # on a CPU; the tests below run the loops, and parts that take less
def test_all_parts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ("probe", "0.6b", "8b", "attention", "control", "lora")
    report = run("gpu", BenchSettings(quick=True, as_json=True, folder=tmp_path, parts=parts))
    found = lines(tmp_path)
    assert report["figures"] == found
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert printed[:-1] == found, "each figure is told at once, and all of them last"
    assert not [figure for figure in found if "error" in figure]
    count = {part: sum(figure["part"] == part for figure in found) for part in parts}
    assert count == {"probe": 1, "0.6b": 8, "8b": 8, "attention": 1, "control": 6, "lora": 2}
    assert set(gpu.PARTS) == {*parts, "serve"}
    assert {figure["peer"] for figure in found if figure["part"] == "8b"} == {"bridle", "generate", "generate_batch"}
    for figure in found[1:]:
        speed = figure["call_us" if figure["part"] == "attention" else "tokens_per_second"]
        assert speed is None or speed > 0
        assert speed is not None or "generate" in figure["peer"]  # a step of theirs may be lost in noise
    decoded = next(figure for figure in found if figure.get("what") == "decode")
    assert decoded["floor_share"] == pytest.approx(decoded["floor_ms"] / decoded["step_ms"])
    assert decoded["over_bare_loop"] == pytest.approx(decoded["bare_step_ms"] / decoded["step_ms"])


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> Iterator[dict[str, Any]]:
        yield {"what": "something"}
        raise RuntimeError("an illegal access")

    monkeypatch.setitem(gpu.WORK, "0.6b", broken)
    report = run("gpu", BenchSettings(quick=True, parts=("probe", "0.6", "attention", "lora"), folder=tmp_path))
    assert report["figures"] == lines(tmp_path)
    assert [figure["part"] for figure in lines(tmp_path)] == ["probe", "0.6b", "0.6b", "attention", "lora", "lora"]
    assert lines(tmp_path)[2]["error"] == "RuntimeError: an illegal access"


def test_a_part_begins_nothing_once_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PARTS", {"control": 0.0, "0.6b": 0.0})
    assert run("gpu", BenchSettings(quick=True, folder=tmp_path))["figures"] == []


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no part is called '70b'; there are probe"):
        run("gpu", BenchSettings(quick=True, parts=("70b",)))
    with pytest.raises(InvalidRequest, match="there is no GPU here; --quick"):
        run("gpu", BenchSettings())


def test_the_bare_loop_draws_what_the_engine_draws() -> None:
    executor, sizes = make_executor("toy", CPU, torch.float32, num_tokens=256, num_seqs=2)
    assert sizes.token_bytes == token_bytes_of("toy", torch.float32)
    executor.clear_kv(executor.info.num_blocks)
    drawn = BareLoop(executor).run(2, 0, 5).outputs
    peer = EnginePeer(executor)
    wanted = peer.generate([[3], [3]], WARM_UP + 5).outputs
    peer.close()
    assert drawn == [output[WARM_UP:] for output in wanted]


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
    monkeypatch.setattr(gpu_attention, "find_spec", lambda name: name)
    module = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)  # type: ignore[arg-type]
    scenes = [gpu_attention.AttentionScene("toy", *size) for size in ((3, 40), (1, 7))]
    return list(gpu_attention.attention(scenes, CPU, torch.float32, Rates(1e9, 1e9), lambda: True))


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
    assert found[1]["error"] == "RuntimeError: no nvcc"


@pytest.mark.slow
def test_streams_are_measured_beside_the_offline_engine(tmp_path: Path) -> None:
    run("gpu", BenchSettings(quick=True, parts=("serve",), folder=tmp_path))
    offline, http = lines(tmp_path)
    assert (offline["peer"], http["peer"]) == ("offline", "http")
    assert http["ratio"] == pytest.approx(http["tokens_per_second"] / offline["tokens_per_second"])
    assert http["failed"] == 0
    assert http["gap_p99_ms"] >= http["gap_p50_ms"] > 0


def test_without_a_server_its_figures_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_serving, "find_spec", lambda name: None if name == "uvicorn" else name)
    run("gpu", BenchSettings(quick=True, parts=("serve",), folder=tmp_path))
    assert lines(tmp_path) == [{"part": "serve", "what": "serve", "left_out": "the server needs uvicorn"}]


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

        from bridle.bench.gpu_models import settings_of

        with torch.device("meta"):
            parameters[name] = sum(p.numel() for p in AutoModelForCausalLM.from_config(settings_of(name)).parameters())
    assert {name: round(count / 1e8) for name, count in parameters.items()} == {"0.6b": 6, "8b": 82}
    assert SHAPES["0.6b"]["vocab_size"] == 151_936
