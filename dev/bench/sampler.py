"""Time to choose tokens, by number of rows and by what is asked for, on random logits.

The logits are already there; what is measured is `StandardSampler` alone, beside one plain argmax over the
same logits, the least that any sampler does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow
from bridle.sampling import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

_BATCHES = (1, 16, 64, 256)
_VOCABULARIES = (32_000, 151_936)
_PASSES, _ROW_SECONDS = 20, 20e-6  # over the logits; of a row, as `MachineLimits.python` has it
_KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5),
    "5 logprobs": SamplingParams(temperature=0.8, logprobs=5),
}


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Milliseconds per call for each vocabulary, number of rows and kind of sampling."""
    figures = []
    for vocabulary in _vocabularies(settings):
        for rows in settings.batches or _BATCHES:
            with phases.part(f"{rows} rows of {vocabulary}"):
                figures += _kinds(vocabulary, rows, _num_rounds(settings))
    _print_table(console, figures)
    return {"num_rounds": _num_rounds(settings), "figures": figures}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """About how many seconds all kinds take: each goes over the logits a number of times, and over each row in
    Python."""
    return {
        f"{rows} rows of {vocabulary}": (len(_KINDS) + 1)
        * (_num_rounds(settings) + 1)
        * (rows * vocabulary * 4 * _PASSES / limits.bandwidth + limits.python(rows * _ROW_SECONDS))
        for vocabulary in _vocabularies(settings)
        for rows in settings.batches or _BATCHES
    }


def _vocabularies(settings: BenchSettings) -> tuple[int, ...]:
    return _VOCABULARIES[:1] if settings.quick else _VOCABULARIES


def _num_rounds(settings: BenchSettings) -> int:
    return 5 if settings.quick else 20


def _kinds(vocabulary: int, rows: int, num_rounds: int) -> list[dict[str, Any]]:
    import torch

    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3  # [R, V]
    floor = _median(lambda: logits.argmax(dim=-1), num_rounds)
    return [
        {
            "vocabulary": vocabulary,
            "rows": rows,
            "kind": kind,
            "milliseconds": 1e3 * (seconds := _sampler_seconds(logits, params, num_rounds)),
            "over_argmax": seconds / floor,
        }
        for kind, params in _KINDS.items()
    ]


def _sampler_seconds(logits: Any, params: SamplingParams, num_rounds: int) -> float:
    from bridle.model.sampler import StandardSampler

    sampler = StandardSampler()
    batch = SampleBatch(0, [SampleRow(i, i, params, key=i) for i in range(logits.shape[0])])
    return _median(lambda: sampler(logits, batch, _history), num_rounds)


def _history(row: SampleRow) -> tuple[Sequence[int], int]:
    return range(64 + row.seq_id % 7), 32


def _median(run: Callable[[], object], num_rounds: int) -> float:
    times = []
    for _ in range(num_rounds + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[num_rounds // 2]


def _print_table(console: Console, figures: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="time to choose tokens")
    for heading in ("vocabulary", "rows", "", "ms", "x argmax"):
        table.add_column(heading, justify="left" if not heading else "right")
    for figure in figures:
        table.add_row(
            str(figure["vocabulary"]),
            str(figure["rows"]),
            figure["kind"],
            f"{figure['milliseconds']:.2f}",
            f"{figure['over_argmax']:.1f}",
        )
    console.print(table)
