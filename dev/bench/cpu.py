"""Benchmark of a CPU: decoding and prompts with weights of each number format, through the whole engine and its front
ends.

Models have real shapes and random weights. bridle is compared in each format with transformers' `generate`. If
`llama-cpp-python` is installed, bridle is also compared with llama.cpp, which runs behind the same engine on the same
files. The programs of a part take turns, and memory bandwidth and arithmetic speed are measured in between. The
benchmark also measures HTTP with 16 streams, compared with the same engine without HTTP, and the cost of controllers.
If LMQL is installed, the benchmark compares LMTP with LMQL's own server.

Parts are measured one by one, and with `folder` each finished part is saved.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import BenchCheckpoint, planned_checkpoint
from bridle.bench.phases import MachineLimits as PhaseLimits
from bridle.bench.phases import Phases
from bridle.bench.settings import BenchSettings
from bridle.model.memory import return_memory
from dev.bench.cpu_files import describe_llamacpp, made_checkpoint
from dev.bench.cpu_limits import CpuLimits
from dev.bench.cpu_parts import BenchPart, guess_seconds, parts
from dev.bench.cpu_peers import load_peers
from dev.bench.cpu_race import as_rows, race
from dev.bench.cpu_report import draw, print_limits, print_race
from dev.bench.cpu_services import SERVICE
from dev.bench.cpu_store import Store

if TYPE_CHECKING:
    from rich.console import Console


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Measure all requested parts that are not measured yet. Print a table for each part after measuring it."""
    wanted = parts(settings)
    with ExitStack() as stack:
        folder = settings.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridle-bench-")))
        store = Store(folder, settings)
        left = _left(wanted, store)
        for line in _announce(wanted, left):
            console.print(line)
        for model, of_model in groupby(left, key=lambda part: part.model):
            _measure_model(made_checkpoint(model, folder), list(of_model), folder, store, settings, console, phases)
        records = [record for part in wanted if (record := store.find(part.name)) is not None]
    if settings.report is not None:
        draw(records, settings.report)
    return {"llama_cpp": describe_llamacpp(), "parts": records}


def guesses(settings: BenchSettings, limits: PhaseLimits) -> dict[str, float]:
    """Return the estimated seconds of each part that is not measured yet."""
    wanted, found = parts(settings), CpuLimits()
    found.look()
    if settings.folder is not None:
        wanted = _left(wanted, Store(settings.folder, settings))
    planned = {name: planned_checkpoint(name) for name in {part.model for part in wanted}}
    return {part.name: guess_seconds(part, planned[part.model], found, settings) for part in wanted}


def _left(wanted: list[BenchPart], store: Store) -> list[BenchPart]:
    return [part for part in wanted if store.find(part.name) is None]


def _announce(wanted: list[BenchPart], left: list[BenchPart]) -> Iterator[str]:
    if len(left) < len(wanted):
        yield f"{len(wanted) - len(left)} of {len(wanted)} parts are measured already"
    found = describe_llamacpp()
    if found is None:
        yield "llama.cpp is not installed (llama-cpp-python) or cannot be given files (gguf): nothing stands beside"
    else:
        built = "for this processor" if found["is_native"] else f"without {', '.join(found['lacks'])} of this processor"
        yield f"llama.cpp: llama-cpp-python {found['version']}, built {built}"


def _measure_model(
    checkpoint: BenchCheckpoint,
    wanted: list[BenchPart],
    folder: Path,
    store: Store,
    settings: BenchSettings,
    console: Console,
    phases: Phases,
) -> None:
    for (group, is_race), members in groupby(wanted, key=lambda part: (part.group, part.case is not None)):
        if is_race:
            _race_group(checkpoint, list(members), folder, store, settings, console, phases)
            continue
        for part in members:
            with phases.part(part.name):
                begin = time.perf_counter()
                found = SERVICE[group](checkpoint, folder, settings, console)
                store.keep({"part": part.name, "service": found}, time.perf_counter() - begin)


def _race_group(
    checkpoint: BenchCheckpoint,
    wanted: list[BenchPart],
    folder: Path,
    store: Store,
    settings: BenchSettings,
    console: Console,
    phases: Phases,
) -> None:
    """Measure the parts that compare the same programs, each of which is loaded once."""
    with load_peers(checkpoint, folder, wanted, settings) as peers:
        for part in wanted:
            present = {name: peers[name] for name in part.peers if name in peers}
            if not present:
                with phases.part(part.name):
                    store.keep({"part": part.name, "figures": []}, 0.0)
                continue
            with phases.part(part.name):
                begin = time.perf_counter()
                figures, limits = race(checkpoint, present, part, folder, settings)
                return_memory()
                store.keep(
                    {"part": part.name, "limits": limits, "figures": as_rows(figures)}, time.perf_counter() - begin
                )
            print_race(console, part, figures)
            print_limits(console, limits)
