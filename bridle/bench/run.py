"""Run a benchmark by name and show what it found."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from bridle.bench.settings import Settings
from bridle.errors import InvalidRequest

#: Name of a benchmark and the module whose `measure(settings, console)` gives its figures.
BENCHMARKS = {
    "engine": "bridle.bench.engine",
    "overhead": "bridle.bench.overhead",
    "control": "bridle.bench.control",
    "controllers": "bridle.bench.controllers",
    "constraints": "bridle.bench.constraints",
    "lmtp": "bridle.bench.lmtp",
    "serve": "bridle.bench.serve",
    "refusals": "bridle.bench.refusals",
    "shard": "bridle.bench.shard",
    "batching": "bridle.bench.batching",
    "losses": "bridle.bench.losses",
    "lora": "bridle.bench.lora",
    "steps": "bridle.bench.steps",
    "simulation": "bridle.bench.simulation",
    "sampler": "bridle.bench.sampler",
    "detokenizer": "bridle.bench.detokenizer",
}

_FILE_WIDTH = 160


def run(name: str, settings: Settings) -> dict[str, Any]:
    """Measure, print a table, and with `settings.as_json` one line of JSON last. Gives the figures.

    Raises `InvalidRequest` for an unknown name.
    """
    if name not in BENCHMARKS:
        raise InvalidRequest(f"no benchmark is called {name!r}; there are {', '.join(BENCHMARKS)}", "NAME")
    from rich.console import Console

    # Tables that go to a file need not be cut to the width of no terminal.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)
    figures: Mapping[str, Any] = import_module(BENCHMARKS[name]).measure(settings, console)
    report = {"benchmark": name, **conditions(settings), **figures}
    if settings.as_json:
        print(json.dumps(report))
    return report


def conditions(settings: Settings) -> dict[str, Any]:
    """Where and how: what must be told along with any figure."""
    import torch

    return {
        "quick": settings.quick,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
