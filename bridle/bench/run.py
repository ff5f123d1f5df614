"""Run a benchmark by name and show its results."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings, set_up
from bridle.bench.subprocesses import unwinding
from bridle.cpu_kernels.features import describe_cpu
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

#: Benchmarks by name, with a description. A benchmark is the module of that name in this package. It has
#: `guesses(settings, limits)`, which returns its parts and their estimated seconds, and `measure(settings, console,
#: phases)`, which runs the parts. It has `THREADS` if it needs another number of threads than torch.
BENCHMARKS = {
    "control": "what steering costs, next to no control",
    "engine": "generated tokens per second compared with transformers' `generate` and its continuous batching, and "
    "their share of the limit that memory bandwidth sets",
    "load": "the start of a server, for a new model and for one that was loaded before, compared with llama.cpp's",
    "real": "real models: start, prompts and 1, 4 and 16 streams, compared with llama.cpp's server and benchmark",
    "serve": "the HTTP server under load, compared with the offline engine",
}
#: The package of developers' benchmarks in a checkout's `dev/`, which is not part of the wheel.
DEV = "dev.bench"

_FILE_WIDTH = 160


def benchmarks() -> dict[str, str]:
    """Return the available benchmarks by name, each with a short description."""
    return BENCHMARKS | (_of_dev() if find_spec(DEV.split(".")[0]) else {})


def _of_dev() -> dict[str, str]:
    """Return the developers' benchmarks in `dev/`. The list of benchmarks is empty if another package is called
    `dev`."""
    try:
        found: dict[str, str] = import_module(DEV).BENCHMARKS
    except (ImportError, AttributeError):
        return {}
    return found


def run(name: str, settings: BenchSettings) -> dict[str, Any]:
    """Run a benchmark and print a table. With `settings.as_json`, the last line is JSON. Returns the figures.

    Raises `InvalidRequest` for an unknown name.
    """
    known = benchmarks()
    if name not in known:
        hint = "" if len(known) > len(BENCHMARKS) else "; from a checkout of bridle, `python -m bridle bench` has more"
        raise InvalidRequest(f"there is no benchmark {name!r}; known are {', '.join(known)}{hint}", "NAME")
    home = __package__ if name in BENCHMARKS else DEV
    from rich.console import Console

    # Tables that go to a file need not be cut to a terminal's width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)
    figures, phases = measured(import_module(f"{home}.{name}"), settings, console)
    times = {"guessed_seconds": round(phases.guessed, 1), "seconds": round(phases.spent, 1)}
    report = {"benchmark": name, **conditions(settings), **times, **figures}
    if settings.as_json:
        print(json.dumps(report))
    return report


def measured(benchmark: Any, settings: BenchSettings, console: Console) -> tuple[Mapping[str, Any], Phases]:
    """Run a benchmark's module; return its figures, and the state of its parts. The benchmark's estimated time is
    printed first."""
    set_up(settings, getattr(benchmark, "THREADS", None))
    phases = Phases(benchmark.guesses(settings, MachineLimits.now()))
    phases.announce()
    with unwinding():
        return benchmark.measure(settings, console, phases), phases


def conditions(settings: BenchSettings) -> dict[str, Any]:
    """Return the conditions of the measurement (versions, machine, threads), which belong to any figure."""
    import torch

    return {
        "quick": settings.quick,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **describe_cpu(),
    }
