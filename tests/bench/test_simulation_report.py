"""The page about simulations is generated from figures; the page in `docs` equals one generated from the stored
figures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bridle.bench import BenchSettings
from bridle.bench.run import measured
from dev.bench import simulation as benchmark
from dev.bench.simulation_report import TABLES, fill_in, write_report
from dev.simulation import POLICIES
from tests.sources import ROOT

PAGE = ROOT / "docs" / "simulation.md"


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Figures of a simulation with a few dozen requests."""
    scale = benchmark.SimulationScale(2, 30, 2, 30, 3, 40, rates=(1.0, 4.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "QUICK", scale)
        return dict(measured(benchmark, BenchSettings(quick=True), Console(file=io.StringIO()))[0])


def test_every_part_runs_and_every_request_is_answered(figures: dict[str, Any]) -> None:
    assert set(TABLES) <= set(figures)
    runs = [run for name in TABLES for run in figures[name]]
    assert all(run["num_answered"] == run["num_requests"] for run in runs)
    assert all({run["policy"] for run in figures[name]} == set(POLICIES) for name in TABLES)


def test_only_what_lies_between_marks_is_written(figures: dict[str, Any]) -> None:
    text = "Before.\n<!-- table: load -->\nold\n<!-- end -->\nAfter <!-- table: large -->\n<!-- end -->\n"
    some = {"scale": figures["scale"], "load": figures["load"]}
    filled = fill_in(text, some)
    assert filled.startswith("Before.\n<!-- table: load -->\n\n2 replicas and 30 requests in each run.\n\n| requests/s")
    assert filled.endswith("<!-- end -->\nAfter <!-- table: large -->\n<!-- end -->\n")
    assert "old" not in filled
    assert fill_in(filled, some) == filled


def test_a_report_is_a_page_with_plots_and_figures_beside_it(figures: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    write_report(figures, page)
    assert json.loads((tmp_path / "page" / "figures.json").read_text()) == json.loads(json.dumps(figures))
    before = {path.name: path.read_bytes() for path in (tmp_path / "page").iterdir()}
    assert set(before) == {"figures.json", *(f"{name}.svg" for name in TABLES)}
    assert page.read_text().count("\n| --- |") == len(TABLES)
    write_report({"scale": figures["scale"], "large": figures["large"]}, page)
    assert (tmp_path / "page" / "large.svg").read_bytes() == before["large.svg"]


def test_the_page_shows_the_figures_beside_it() -> None:
    figures = json.loads((PAGE.with_suffix("") / "figures.json").read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    assert fill_in(text, figures) == text
    assert all(f"(simulation/{name}.svg)" in text for name in TABLES)
