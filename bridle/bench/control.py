"""Benchmark of the cost of controllers: `bridle bench control`.

On a simulated device with steps of 20 ms, two costs are measured: the time that controllers add to a step, and that of
masks in the sampler. On a real model, the benchmark measures how much controllers slow down generation, and their
processor time. Figures are medians of runs in turns, so that other work on the machine affects all alike.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import BenchCheckpoint, make_checkpoint, planned_checkpoint
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings

if TYPE_CHECKING:
    from rich.console import Console

_DEVICE_SECONDS = 0.020
_VOCAB_SIZE = 32_000
_BATCHES = (1, 10, 40)
#: Numbers of neutral controllers that steer in addition to a module.
_BESIDE = (0, 1, 2, 4)
_MODEL = "20m"
THREADS = 1
_TITLES = {
    "critical_path": "control on the critical path of a step of 20 ms, beyond no control",
    "composed": "neutral controllers beside a module, in a step of 20 ms, beyond the module alone",
    "mask_in_sampler": "masks in the sampler",
    "slowdown": f"8 sequences on the {_MODEL} model",
}


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Return all figures. The figures are in milliseconds unless a name says otherwise."""
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as name:
        folder = Path(name)
        checkpoint = make_checkpoint(_MODEL, folder)
        figures: dict[str, Any] = {}
        for part, measured in _parts(checkpoint, folder, settings).items():
            with phases.part(_TITLES[part]):
                figures[part] = measured()
    for part, title in _TITLES.items():
        print_table(console, title, figures[part])
    return figures


def _parts(
    checkpoint: BenchCheckpoint, folder: Path, settings: BenchSettings
) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    return {
        "critical_path": lambda: time_critical_path(folder, settings),
        "composed": lambda: time_composed(folder, settings),
        "mask_in_sampler": lambda: time_masks(settings),
        "slowdown": lambda: slowdown(checkpoint, folder, settings),
    }


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated duration of each part in seconds. Each step of the simulated device waits for a fixed time.
    The estimate assumes that the sampler reads the logits about twenty times."""
    from bridle.bench.control_programs import slowdown_scale

    checkpoint = planned_checkpoint(_MODEL)
    batches = settings.batches or _BATCHES
    critical, composed = (steps * rounds * _DEVICE_SECONDS * len(batches) for steps, rounds in _scales(settings))
    num_steps, rounds = slowdown_scale(quick=settings.quick)
    rows = 2 * _mask_rounds(settings) * sum(batches)
    return {
        _TITLES["critical_path"]: critical * 2 * 3,  # blocking or not, with three kinds of controllers
        _TITLES["composed"]: composed * len(_BESIDE),
        _TITLES["mask_in_sampler"]: rows * _VOCAB_SIZE * 4 * 20 / limits.bandwidth,
        _TITLES["slowdown"]: 3 * rounds * limits.seconds(checkpoint, 8 * (32 + num_steps), num_steps),
    }


def _scales(settings: BenchSettings) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the numbers of steps and rounds, for the parts `critical_path` and `composed`."""
    return ((30, 1), (30, 1)) if settings.quick else ((100, 3), (100, 5))


def _mask_rounds(settings: BenchSettings) -> int:
    return 5 if settings.quick else 40


def time_critical_path(folder: Path, settings: BenchSettings) -> list[dict[str, Any]]:
    """Return the time from the end of the device's work to the sampler, for each number of sequences and kind of
    controller. The time from the end of the device's work to the sampler is also measured without controllers."""
    from bridle.bench import control_guests as guests
    from bridle.bench.control_device import CriticalPath, critical_path, runtime_pool, upload

    tokenizer = guests.write_tokenizer(folder / "tokenizer", _VOCAB_SIZE)
    num_steps, rounds = _scales(settings)[0]
    figures = []
    with runtime_pool(tokenizer, folder / "store", _VOCAB_SIZE, "--wasm-max-step-time", "500") as pool:
        modules = {"none": None, "trivial": upload(pool, guests.trivial()), "walk": upload(pool, guests.walk())}
        for batch in settings.batches or _BATCHES:
            for blocks in (True, False):
                runs: dict[str, list[CriticalPath]] = {kind: [] for kind in modules}
                for _ in range(rounds):
                    for kind, module in modules.items():
                        runs[kind].append(critical_path(pool, module, batch, num_steps, _DEVICE_SECONDS, blocks=blocks))
                base = median(run.gap for run in runs["none"]), median(run.step for run in runs["none"])
                figures += [
                    {
                        "sequences": batch,
                        "device": "blocks" if blocks else "does not block",
                        "controller": kind,
                        "milliseconds": 1e3 * (median(run.gap for run in values) - base[0]),
                        "least_milliseconds": 1e3 * (min(run.gap for run in values) - min(r.gap for r in runs["none"])),
                        "p99_milliseconds": 1e3 * median(run.gap_p99 for run in values),
                        "step_milliseconds": 1e3 * (median(run.step for run in values) - base[1]),
                        "drawing": median(run.rows for run in values),
                    }
                    for kind, values in runs.items()
                    if kind != "none"
                ]
    return figures


def time_composed(folder: Path, settings: BenchSettings) -> list[dict[str, Any]]:
    """Return the cost of neutral controllers (which change nothing) next to a module that allows everything. The cost
    is time of the critical path, and processor time of the engine's process."""
    from bridle.bench import control_guests as guests
    from bridle.bench.control_device import CriticalPath, critical_path, runtime_pool, upload

    tokenizer = guests.write_tokenizer(folder / "tokenizer", _VOCAB_SIZE)
    num_steps, rounds = _scales(settings)[1]
    figures = []
    with runtime_pool(tokenizer, folder / "composed", _VOCAB_SIZE, "--wasm-max-step-time", "500") as pool:
        module = upload(pool, guests.trivial())
        for batch in settings.batches or _BATCHES:
            runs: dict[int, list[CriticalPath]] = {number: [] for number in _BESIDE}
            for _ in range(rounds):
                for number, values in runs.items():
                    values.append(
                        critical_path(pool, module, batch, num_steps, _DEVICE_SECONDS, blocks=True, num_neutral=number)
                    )
            alone = runs[0]
            figures += [
                {
                    "sequences": batch,
                    "neutral": number,
                    "milliseconds": 1e3 * (median(run.gap for run in values) - median(run.gap for run in alone)),
                    "least_milliseconds": 1e3 * (min(run.gap for run in values) - min(run.gap for run in alone)),
                    "cpu_milliseconds": 1e3 * (min(run.cpu for run in values) - min(run.cpu for run in alone)),
                }
                for number, values in runs.items()
                if number
            ]
    return figures


def time_masks(settings: BenchSettings) -> list[dict[str, Any]]:
    """Return the extra time of the sampler if every row has a mask."""
    import torch

    from bridle.engine.control.decision import mask_of
    from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow
    from bridle.model.sampler import StandardSampler
    from bridle.sampling import SamplingParams

    figures = []
    sampler, params = StandardSampler(), SamplingParams(temperature=0.8)
    mask = mask_of(range(0, _VOCAB_SIZE, 3), _VOCAB_SIZE)
    for rows in settings.batches or _BATCHES:
        logits = torch.randn(rows, _VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3  # [R, V]
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(_mask_rounds(settings)):
            for masked in (False, True):
                drawn = [SampleRow(i, i, params, key=i, mask=mask if masked else None) for i in range(rows)]
                begin = time.perf_counter()
                sampler(logits, SampleBatch(0, drawn), lambda seq_id: ((), 0))
                times[masked].append(time.perf_counter() - begin)
        plain, masked_time = median(times[False]), median(times[True])
        figures.append({"rows": rows, "milliseconds": 1e3 * (masked_time - plain), "sampler_milliseconds": 1e3 * plain})
    return figures


def slowdown(checkpoint: BenchCheckpoint, folder: Path, settings: BenchSettings) -> list[dict[str, Any]]:
    """Return the slowdown by controllers on a real model."""
    from bridle.bench import control_guests as guests
    from bridle.bench import control_programs as programs
    from bridle.bench.control_device import runtime_pool

    tokenizer = guests.write_tokenizer(checkpoint.path, checkpoint.vocab_size) / "tokenizer.json"
    limit = ("--wasm-max-step-time", "500")
    executor = programs.load(checkpoint.path, settings.threads or THREADS)
    try:
        with runtime_pool(tokenizer, folder / "store", checkpoint.vocab_size, *limit) as pool:
            return programs.slowdown(executor, pool, quick=settings.quick)
    finally:
        executor.close()


def print_table(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print a row for each figure, with the figure's fields as columns."""
    from rich.table import Table

    table = Table(title=title)
    for heading in rows[0] if rows else ():
        table.add_column(heading.replace("_milliseconds", " ms").replace("milliseconds", "ms").replace("_", " "))
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
