"""`bridle bench gpu` in its tiny form: its code runs, its lines come at once, and what fails spoils nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle.bench import Settings, gpu, run
from bridle.bench.gpu_models import SHAPES, make_executor, token_bytes_of
from bridle.bench.gpu_speed import WARM_UP, BareLoop, Race
from bridle.bench.peers import EnginePeer
from bridle.errors import InvalidRequest, OutOfBlocks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.bench.roof.bench_device", lambda: CPU)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / gpu.FILE_NAME).read_text().splitlines()]


def test_all_parts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run("gpu", Settings(quick=True, as_json=True, folder=tmp_path))
    found = lines(tmp_path)
    assert report["figures"] == found
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert printed[:-1] == found, "each figure is told at once, and all of them last"
    assert not [figure for figure in found if "error" in figure]
    count = {part: sum(figure["part"] == part for figure in found) for part in gpu.PARTS}
    assert count == {"probe": 1, "0.6b": 6, "8b": 6, "control": 6, "lora": 2}
    assert {figure["peer"] for figure in found if figure["part"] == "8b"} == {"bridle", "generate"}
    for figure in found[1:]:
        assert figure["tokens_per_second"] > 0
    decoded = next(figure for figure in found if figure.get("what") == "decode")
    assert decoded["floor_share"] == pytest.approx(decoded["floor_ms"] / decoded["step_ms"])
    assert decoded["over_bare_loop"] == pytest.approx(decoded["bare_step_ms"] / decoded["step_ms"])


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> Iterator[dict[str, Any]]:
        yield {"what": "something"}
        raise RuntimeError("an illegal access")

    monkeypatch.setitem(gpu._WORK, "0.6b", broken)
    run("gpu", Settings(quick=True, parts=("probe", "0.6", "lora"), folder=tmp_path))
    assert [figure["part"] for figure in lines(tmp_path)] == ["probe", "0.6b", "0.6b", "lora", "lora"]
    assert lines(tmp_path)[2]["error"] == "RuntimeError: an illegal access"


def test_a_part_begins_nothing_once_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PARTS", {"control": 0.0, "0.6b": 0.0})
    assert run("gpu", Settings(quick=True, folder=tmp_path))["figures"] == []


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no part is called '70b'; there are probe"):
        run("gpu", Settings(quick=True, parts=("70b",)))
    with pytest.raises(InvalidRequest, match="there is no GPU here; --quick"):
        run("gpu", Settings())


def test_the_bare_loop_draws_what_the_engine_draws() -> None:
    executor, sizes = make_executor("toy", CPU, torch.float32, num_tokens=256, num_seqs=2)
    assert sizes.token_bytes == token_bytes_of("toy", torch.float32)
    executor.clear_kv(executor.info.num_blocks)
    drawn = BareLoop(executor).run(2, 0, 5).outputs
    peer = EnginePeer(executor)
    wanted = peer.generate([[3], [3]], WARM_UP + 5).outputs
    peer.close()
    assert drawn == [output[WARM_UP:] for output in wanted]


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
