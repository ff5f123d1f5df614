"""The benchmark of models with recurrent layers, with a tiny one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bridle.bench import BenchSettings
from bridle.bench.run import measured
from bridle.errors import InvalidRequest
from dev.bench import hybrid

TINY = {"model_type": "mamba2", "vocab_size": 8_192, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8}


def test_speeds_and_reuse_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hybrid.SHAPES, "tiny", {**TINY, "head_dim": 8, "state_size": 8})
    monkeypatch.setattr(hybrid, "scale_of", lambda settings: (40, 2, 1))
    settings = BenchSettings(quick=True, models=("tiny",), threads=1)
    figures, phases = measured(hybrid, settings, Console(file=io.StringIO()))
    speeds = {row["measured"]: row["tokens/s"] for row in figures["tiny"] if "tokens/s" in row}
    times = {row["measured"]: row["milliseconds"] for row in figures["tiny"] if "milliseconds" in row}
    assert list(speeds) == ["prompt", "1 at once", "16 at once"]
    first = ["first token, computed", "first token, prefix hit"]
    rewinds = ["40 tokens, 0 rewinds of 6", "40 tokens, 8 rewinds of 6"]
    assert list(times) == [*first, "8 forks", *rewinds, "8 prompts"]
    assert all(value > 0 for value in (*speeds.values(), *times.values()))
    assert phases.left == 0.0


@pytest.mark.parametrize(("parts", "found"), [(("spe",), "tokens/s"), (("reuse",), "milliseconds")])
def test_parts_are_chosen(parts: tuple[str, ...], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hybrid.SHAPES, "tiny", {**TINY, "head_dim": 8, "state_size": 8})
    monkeypatch.setattr(hybrid, "scale_of", lambda settings: (40, 2, 1))
    settings = BenchSettings(quick=True, models=("tiny",), threads=1, parts=parts)
    figures, _ = measured(hybrid, settings, Console(file=io.StringIO()))
    assert figures["tiny"] and all(found in row for row in figures["tiny"])


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="parts: got prompts; the parts are speed, reuse"):
        hybrid.parts_of(BenchSettings(parts=("prompts",)))


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no model is called 'nothing'; give a folder, or one of lfm2-350m"):
        hybrid.guesses(BenchSettings(models=("nothing",)), None)  # type: ignore[arg-type]
