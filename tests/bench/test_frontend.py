"""The benchmark of the front end counts what a real server streams."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from bridle.bench.run import measured
from bridle.bench.settings import BenchSettings
from dev.bench import frontend


@pytest.mark.slow
def test_every_api_streams_its_tokens() -> None:
    screen = io.StringIO()
    settings = BenchSettings(quick=True, batches=(2,), front_ends=2)
    report, phases = measured(frontend, settings, Console(file=screen, width=200))
    figures = {each["api"]: each for each in report["figures"]}
    assert set(figures) == {"completions", "chat", "responses", "messages", "ollama"}
    for api, each in figures.items():
        assert each["streams"] == 2
        # costs per token are differences of two times, so they may be negative on a busy machine
        costs = [each[f"{who}token_microseconds"] for who in ("", "engine_", "writer_")]
        assert all(math.isfinite(cost) and cost != 0 for cost in costs), api
        assert each["step_milliseconds"] > 0 and each["step_milliseconds_alone"] > 0
        assert 0.5 < each["events_per_token"] < 1.3, api
    assert "messages" in screen.getvalue() and phases.spent > 0
