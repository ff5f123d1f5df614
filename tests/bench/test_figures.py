"""The arithmetic of the benchmarks, and that each of them runs. Times are never asserted."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bridle.bench import BENCHMARKS, BenchSettings, benchmarks, run
from bridle.bench.checkpoints import SHAPES, BenchCheckpoint, make_checkpoint
from bridle.bench.control_device import InstantExecutor
from bridle.bench.engine import EngineFigure, agreement_of, check_lengths, compare, make_prompts, roof
from bridle.bench.roofline import read_bandwidth, triad_bandwidth
from bridle.bench.run import measured
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow
from bridle.errors import InvalidRequest
from bridle.sampling import SamplingParams
from dev.bench import cpu, overhead
from dev.bench.cpu_limits import CpuCase, CpuLimits
from dev.bench.cpu_parts import cases, parts
from dev.bench.cpu_store import Store
from tests.sources import DEV, PACKAGE

CHECKPOINT = BenchCheckpoint("small", Path(), vocab_size=100, num_parameters=10, step_bytes=1000, token_bytes=2)


def figure(peer: str, seconds: float, first_seconds: float) -> EngineFigure:
    return EngineFigure("small", 4, peer, 32, 40, 64, seconds, first_seconds, 2 * seconds, first_seconds)


def test_roof_counts_weights_once_and_kv_per_sequence() -> None:
    # 4 tokens a step; a step reads 1000 bytes of weights and 2 bytes for each of 40 + 64 / 2 tokens of context
    assert roof(figure("x", 1, 0), CHECKPOINT, bandwidth=2288.0) == pytest.approx(4 * 2288 / (1000 + 2 * 72))


def test_speeds_are_compared_with_the_first_figure() -> None:
    figures = [figure("generate", 8.0, 2.0), figure("bridle", 4.0, 1.0)]
    compare(figures, CHECKPOINT, bandwidth=1144.0)
    assert [f.tokens_per_second for f in figures] == [8.0, 16.0]
    assert [f.decode_per_second for f in figures] == [10.0, 20.0]  # 60 tokens in 6 and in 3 seconds
    assert [f.ratio for f in figures] == [1.0, 2.0]
    assert [f.decode_ratio for f in figures] == [1.0, 2.0]
    assert [f.cpu_ratio for f in figures] == [1.0, 2.0]
    assert [f.decode_cpu_ratio for f in figures] == [1.0, 2.0]  # 16 - 2 and 8 - 1 seconds
    assert [f.roof_share for f in figures] == [2.5, 5.0]


def test_prompts_are_repeatable_and_prefixes_of_larger_batches() -> None:
    assert make_prompts(4, 100) == make_prompts(4, 100)
    assert all(3 <= token < 100 for prompt in make_prompts(8, 100) for token in prompt)
    assert len({len(prompt) for prompt in make_prompts(16, 100)}) > 1


def test_agreement_is_the_share_of_equal_outputs() -> None:
    assert agreement_of([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.5


def test_early_end_is_refused() -> None:
    class Early:
        name = "early"

    with pytest.raises(RuntimeError, match="early generated 1 tokens; 2 were requested"):
        check_lengths(Early(), [[1, 2], [3]], 2)  # type: ignore[arg-type]


def test_bandwidth_is_a_positive_number() -> None:
    assert read_bandwidth(num_rounds=1, num_bytes=1 << 20) > 0
    assert triad_bandwidth(num_rounds=1, num_bytes=1 << 20) > 0


@pytest.mark.parametrize("tied", [True, False])
def test_step_bytes_leave_out_what_is_only_looked_up(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    monkeypatch.setitem(SHAPES, "tiny", shape)
    made = make_checkpoint("tiny", tmp_path)
    table = 64 * 16
    assert made.step_bytes == 4 * (made.num_parameters - (0 if tied else table))
    assert made.token_bytes == 2 * 4 * 2 * (16 // 4 * 2)  # keys and values, float32, layers, width
    assert (made.path / "model.safetensors").is_file()


def test_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"model_size is '7b'; must be one of 20m, 0\.5b"):
        make_checkpoint("7b", tmp_path)


def test_unknown_benchmark_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'speed'; known are control, engine, load, real, serve"):
        run("speed", BenchSettings())


def test_instant_executor_answers_every_row() -> None:
    batch = SampleBatch(3, [SampleRow(i, i, SamplingParams()) for i in range(5)])
    result = InstantExecutor(5, 64).sample(batch)
    assert (result.step, result.tokens, result.logprobs) == (3, [100] * 5, [None] * 5)


def test_json_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = run("overhead", BenchSettings(quick=True, batches=(2,), as_json=True))
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == report
    assert report["benchmark"] == "overhead"
    assert {row["sequences"] for row in report["figures"]} == {2}


def test_every_benchmark_is_listed_and_there() -> None:
    known = benchmarks()
    homes = [(PACKAGE / "bench", BENCHMARKS), (DEV / "bench", {name for name in known if name not in BENCHMARKS})]
    for folder, names in homes:
        found = {path.stem for path in folder.glob("*.py") if "def measure(" in path.read_text(encoding="utf-8")}
        assert found == set(names)


def test_without_the_laboratory_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["bridle.bench.run"], "DEV", "no_lab_here.bench")
    assert benchmarks() == BENCHMARKS
    with pytest.raises(InvalidRequest, match="from a checkout"):
        run("lora", BenchSettings())


def test_overhead_measures_every_variant() -> None:
    report, _ = measured(overhead, BenchSettings(quick=True, batches=(1, 3)), Console(file=io.StringIO()))
    assert {(row["variant"], row["sequences"]) for row in report["figures"]} == {
        (variant, batch) for variant in ("plain", "with text", "controlled") for batch in (1, 3)
    }


def test_cpu_cases_cover_decoding_and_prompts() -> None:
    found = cases(BenchSettings())
    assert [(c.batch, c.context) for c in found if c.kind == "decode"] == [
        (batch, context) for context in (128, 1024) for batch in (1, 4, 16, 64)
    ]
    assert [c.context for c in found if c.kind == "prefill"] == [256, 2048]


def test_cpu_parts_are_picked_by_pieces_of_their_names() -> None:
    names = [part.name for part in parts(BenchSettings())]
    assert len(names) == len(set(names)) == 2 * (4 * 10 + 3)
    assert [part.name for part in parts(BenchSettings(parts=("decode 8-bit 16x", "1.5b http")))] == [
        *("0.5b decode 8-bit 16x128", "0.5b decode 8-bit 16x1024", "1.5b decode 8-bit 16x128"),
        *("1.5b decode 8-bit 16x1024", "1.5b http"),
    ]
    with pytest.raises(InvalidRequest, match=r"contains 'decoed'; there are '0\.5b decode float32 1x128'"):
        parts(BenchSettings(parts=("decoed",)))


def test_cpu_parts_without_transformers_are_those_that_it_is_too_slow_for() -> None:
    found = {part.name: part.peers for part in parts(BenchSettings(parts=("float32",), model_sizes=("0.5b",)))}
    assert found["0.5b decode float32 4x1024"] == ("transformers float32", "bridle float32")
    assert found["0.5b decode float32 16x1024"] == ("bridle float32",)


def test_limits_are_the_slower_of_memory_and_arithmetic() -> None:
    limits = CpuLimits(100.0, 1000.0, 250.0)
    checkpoint = BenchCheckpoint("small", Path(), 100, 10, step_bytes=4000, token_bytes=2, head_numbers=500)
    # 1000 weights of a byte each and 2 bytes for each of 10 tokens, of each of 3 sequences
    assert limits.seconds(checkpoint, "int8", CpuCase("decode", 3, 10), 3) == pytest.approx(1060 / 100)
    assert limits.seconds(checkpoint, "int8", CpuCase("decode", 64, 0), 64) == pytest.approx(2 * 1000 * 64 / 1000)
    assert limits.seconds(checkpoint, "float32", CpuCase("decode", 1, 0), 1) == pytest.approx(4000 / 100)
    assert limits.seconds(checkpoint, "float32", CpuCase("decode", 64, 0), 64) == pytest.approx(2 * 1000 * 64 / 250)
    # of a prompt's tokens the last alone goes through the head
    assert limits.seconds(checkpoint, "int8", CpuCase("prefill", 1, 256), 256) == pytest.approx(2 * 500 * 256 / 1000)


def test_a_part_that_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    quick, full = BenchSettings(quick=True), BenchSettings()
    Store(tmp_path, quick).keep({"part": "a", "limits": CpuLimits(1.0, 2.0, 3.0)}, 5.0)
    Store(tmp_path, full).keep({"part": "a", "figures": [7]}, 6.0)
    found = Store(tmp_path, quick).find("a")
    assert found is not None and found["limits"]["operations"] == 2.0 and found["seconds"] == 5.0
    again = Store(tmp_path, full).find("a")
    assert again is not None and again["figures"] == [7] and Store(tmp_path, full).find("b") is None
    (tmp_path / "figures.jsonl").write_text("{")
    with pytest.raises(InvalidRequest, match=r"figures\.jsonl is damaged"):
        Store(tmp_path, full)


@pytest.mark.slow
def test_cpu_measures_every_form_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dev.bench.cpu_limits.read_bandwidth", lambda num_rounds: 1e10)
    first = BenchSettings(quick=True, batches=(2,), model_sizes=("20m",), folder=tmp_path, parts=("8-bit", "lmtp"))
    measured(cpu, first, Console(file=io.StringIO(), width=120))
    out = io.StringIO()
    settings = replace(first, parts=("decode", "prefill", "lmtp"), report=tmp_path / "plot.svg")
    report, _ = measured(cpu, settings, Console(file=out, width=120))
    assert "3 of 9 parts are measured already" in out.getvalue()
    assert "prefill: a prompt" in out.getvalue() and "2 of 128 tokens" in out.getvalue()
    figures = [figure for part in report["parts"] for figure in part.get("figures", ())]
    named = {f"bridle {form}" for form in ("float32", "int8", "Q8_0", "Q4_0", "Q4_K_M")}
    assert named <= {figure["peer"] for figure in figures}
    assert all(0 < figure["tokens_per_second"] < 1e7 and figure["limit_share"] > 0 for figure in figures)
    assert (tmp_path / "plot.svg").stat().st_size > 1000
