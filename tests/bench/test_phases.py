"""Benchmarks say how long they take before they begin, by what their parts do, and correct it as they go."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bridle.bench import control, engine, serve
from bridle.bench.checkpoints import Checkpoint
from bridle.bench.phases import Limits, Phases, show_seconds
from bridle.bench.settings import Settings

#: The sizes of the small model.
MADE = Checkpoint("20m", Path("/nowhere"), 8_192, 20_000_000, 80_000_000, 24_576)
LIMITS = Limits(bandwidth=10e9, products=20e9)
QUICK, FULL = Settings(quick=True), Settings()


def screen(is_terminal: bool = True) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=120, highlight=False), file


def test_what_is_left_is_told_and_corrected() -> None:
    console, file = screen()
    times = iter([0.0, 20.0, 20.0, 60.0])
    phases = Phases(console, {"one": 10.0, "two": 20.0, "three": 30.0}, clock=lambda: next(times))
    phases.announce()
    assert phases.left == 60.0
    with phases.part("one"):
        pass
    assert phases.left == 100.0  # twice as long as was guessed
    with phases.part("two"):
        pass
    assert phases.left == 60.0
    told = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "3 parts, about 60 s if the machine stays as busy as it is now" in told
    assert "part 1 of 3: one, about 60 s left" in told and "part 2 of 3: two, about 2 minutes left" in told


def test_a_file_gets_the_first_line_alone() -> None:
    console, file = screen(is_terminal=False)
    phases = Phases(console, {"one": 600.0})
    phases.announce()
    with phases.part("one"):
        pass
    assert file.getvalue() == "1 part, about 10 minutes if the machine stays as busy as it is now\n"


@pytest.mark.parametrize(
    "guesses",
    [
        lambda made, settings, limits: engine._guesses([made], settings, limits),
        lambda made, settings, limits: control._guesses(made, settings, limits),
        lambda made, settings, limits: serve._guesses(made, serve._QUICK if settings.quick else serve._FULL, limits),
    ],
    ids=["engine", "control", "serve"],
)
def test_guesses_follow_the_work_and_the_machine(guesses: Callable[..., dict[str, float]]) -> None:
    quick, full = (sum(guesses(MADE, settings, LIMITS).values()) for settings in (QUICK, FULL))
    assert 0 < 2 * quick < full
    slower = Limits(LIMITS.bandwidth / 10, LIMITS.products / 10)
    assert sum(guesses(MADE, FULL, slower).values()) > full
    assert all(seconds > 0 for seconds in guesses(MADE, QUICK, LIMITS).values())


def test_each_part_of_a_benchmark_is_one_that_was_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures is replaced; what announces, names and counts is not."""
    for name in ("_critical_path", "_composed", "_masks", "_slowdown"):
        monkeypatch.setattr(control, name, lambda *given: [{"milliseconds": 1.0}])
    monkeypatch.setattr(control, "make_checkpoint", lambda name, folder: MADE)
    console, file = screen(is_terminal=False)
    figures: dict[str, Any] = control.measure(Settings(quick=True, threads=1), console)
    assert list(figures) == ["critical_path", "composed", "mask_in_sampler", "slowdown"]
    assert file.getvalue().startswith("4 parts, about ")


def test_the_machine_is_looked_at() -> None:
    found = Limits.now()
    assert found.bandwidth > 0 and found.products > 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (89.0, "89 s"), (600.0, "10 minutes"), (7200, "2.0 hours")]
)
def test_durations_are_for_people(seconds: float, words: str) -> None:
    assert show_seconds(seconds) == words
