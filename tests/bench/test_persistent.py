"""`bridle bench persistent`: the parts that are measured, and on the demo model that a prompt comes back from disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.bench.settings import BenchSettings
from bridle.demo import demo_model_path
from dev.bench import persistent


def test_parts_are_chosen_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "llama-server").touch()
    settings = BenchSettings(models=("a.gguf", "b.gguf"), llama_server=tmp_path / "llama-server", parts=("2000",))
    servers = ("bridle", "llama-server")
    assert persistent.parts_of(settings) == [(model, name, 2000) for model in settings.models for name in servers]
    assert persistent.parts_of(BenchSettings(quick=True, models=("a.gguf",))) == [("a.gguf", "bridle", 500)]
    row = persistent.PersistentRow("a", "bridle", 500, computed=4.0, memory=0.1, disk=0.2)
    assert row.share == pytest.approx(0.05)


@pytest.mark.slow
def test_the_prompt_comes_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "FIRST_ID", 10)  # the demo model's vocabulary is smaller than those of real models
    monkeypatch.setattr(persistent, "NUM_IDS", 1000)
    row = persistent.measure_own(str(demo_model_path()), tmp_path, 1500, BenchSettings(threads=1))
    assert row.num_tokens == 1500
    assert row.gap is not None and row.gap_p99 is not None
    assert list((tmp_path / "kv").glob("*/*.kv"))
