"""Benchmarks say how long they take before they begin, by what their parts do, and correct it as they go: all of them,
those of the laboratory, too."""

from __future__ import annotations

import io
import re
from dataclasses import astuple
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from bridle.bench import BENCHMARKS, benchmarks, control, engine
from bridle.bench.checkpoints import BenchCheckpoint, make_checkpoint, planned_checkpoint
from bridle.bench.phases import MachineLimits, Phases, show_seconds
from bridle.bench.run import DEV, measured
from bridle.bench.settings import BenchSettings
from dev.bench import cpu, cpu_limits, lmtp, overhead

#: The sizes of the small model.
MADE = BenchCheckpoint("20m", Path("/nowhere"), 8_192, 20_000_000, 80_000_000, 24_576)
LIMITS = MachineLimits(bandwidth=10e9, products=20e9, loops=35e6)
QUICK = BenchSettings(quick=True, threads=1)


def screen(is_terminal: bool = True) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=120, highlight=False), file


def test_what_is_left_is_told_and_corrected() -> None:
    console, file = screen()
    times = iter([0.0, 20.0, 20.0, 60.0])
    phases = Phases({"one": 10.0, "two": 20.0, "three": 30.0}, console, clock=lambda: next(times))
    phases.announce()
    assert phases.left == 60.0
    with phases.part("one"):
        pass
    assert phases.left == 100.0  # twice as long as was guessed
    with phases.part("two"):
        pass
    assert phases.left == 60.0
    told = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "3 parts, about 60 s if the load of the machine stays the same" in told
    assert "part 1 of 3: one, about 60 s left" in told and "part 2 of 3: two, about 2 minutes left" in told


def test_a_file_gets_the_first_line_alone() -> None:
    console, file = screen(is_terminal=False)
    phases = Phases({"one": 600.0}, console)
    phases.announce()
    with phases.part("one"):
        pass
    assert file.getvalue() == "1 part, about 10 minutes if the load of the machine stays the same\n"


def module_of(name: str) -> ModuleType:
    return import_module(f"{'bridle.bench' if name in BENCHMARKS else DEV}.{name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files like those that `bridle bench schemas` gets."""
    for number in range(250):
        (tmp_path / f"{number}.json").write_text("{}")
    return tmp_path


@pytest.mark.few(8)
@pytest.mark.parametrize("name", sorted(benchmarks()))
def test_every_benchmark_guesses_by_its_work_and_the_machine(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmtp, "lmql_python", lambda folder: Path("python"))
    monkeypatch.setattr(cpu, "CpuLimits", CpuLimits)
    guesses = module_of(name).guesses
    given = {
        "schemas": {"folder": folder},
        "cpu": {"model_sizes": ("20m",)},
        "load": {"models": ("model.gguf",)},
        "persistent": {"models": (str(folder / "2.json"),)},
        "real": {
            "models": (str(folder / "2.json"),),
            "llama_server": folder / "0.json",
            "llama_bench": folder / "1.json",
        },
    }.get(name, {})
    quick, full = (guesses(BenchSettings(quick=each, **given), LIMITS) for each in (True, False))
    assert all(seconds > 0 for part in (quick, full) for seconds in part.values())
    assert 0 < sum(quick.values()) < sum(full.values())
    if name != "cpu":  # which has limits of its own
        slower = guesses(BenchSettings(**given), MachineLimits(*(each / 10 for each in astuple(LIMITS))))
        assert slower.keys() == full.keys() and sum(slower.values()) > sum(full.values())


class CpuLimits(cpu_limits.CpuLimits):
    """Nothing is measured."""

    def look(self) -> None:
        self.bandwidth, self.operations, self.float_operations = 10e9, 100e9, 40e9


def test_what_a_user_chooses_is_what_is_guessed() -> None:
    more = engine.guesses(BenchSettings(quick=True, batches=(1, 2, 3)), LIMITS)
    assert list(more) == [f"20m, {batch} at once" for batch in (1, 2, 3)]
    few = overhead.guesses(BenchSettings(batches=(2,)), LIMITS)
    assert few and all(part.endswith(", 2 at once") for part in few)


def test_each_part_that_was_announced_runs(capfd: pytest.CaptureFixture[str]) -> None:
    """Each part that runs must have been announced with an estimate; a part without one is an error. Standard output
    contains only the figures."""
    phases = measured(module_of("overhead"), BenchSettings(quick=True, batches=(1, 2)), screen(is_terminal=False)[0])[1]
    assert phases.left == 0.0 and phases.spent > 0.0
    told = capfd.readouterr()
    assert re.fullmatch(r"\d+ parts?, about .* if the load of the machine stays the same\n", told.err)
    assert not told.out


def test_each_part_of_a_benchmark_is_one_that_was_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring functions are replaced; announcing, naming and counting parts are real."""
    for name in ("time_critical_path", "time_composed", "time_masks", "slowdown"):
        monkeypatch.setattr(control, name, lambda *given: [{"milliseconds": 1.0}])
    monkeypatch.setattr(control, "make_checkpoint", lambda name, folder: MADE)
    console, _ = screen(is_terminal=False)
    phases = Phases(control.guesses(QUICK, LIMITS), console)
    figures: dict[str, Any] = control.measure(QUICK, console, phases)
    assert list(figures) == ["critical_path", "composed", "mask_in_sampler", "slowdown"]
    assert phases.left == 0.0


def test_what_is_planned_is_what_is_made(tmp_path: Path) -> None:
    assert planned_checkpoint("20m", tmp_path) == make_checkpoint("20m", tmp_path)


def test_nothing_is_left_of_what_was_measured_before() -> None:
    console, file = screen()
    Phases({}, console).announce()
    assert file.getvalue() == "nothing is left to measure\n"


def test_what_is_printed_meanwhile_goes_where_it_should(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If standard output is a file, the progress line on the terminal does not show what is printed to that file."""
    console, file = screen()
    with Phases({"one": 1.0}, console).part("one"):
        Console().print("a table")
    assert capsys.readouterr().out == "a table\n"
    assert "a table" not in file.getvalue() and "part 1 of 1: one" in file.getvalue()


def test_the_machine_is_looked_at() -> None:
    found = MachineLimits.now()
    assert found.bandwidth > 0 and found.products > 0 and found.loops > 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (89.0, "89 s"), (600.0, "10 minutes"), (7200, "2.0 hours")]
)
def test_durations_are_for_people(seconds: float, words: str) -> None:
    assert show_seconds(seconds) == words
