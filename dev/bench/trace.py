"""Benchmark of token traces: `bridle bench trace`. The benchmark runs the same requests with a trace and without one,
in turns.

Figures are processor time of the whole process, because other work on the machine affects it little. They include the
engine, the sampler and the reader of the stream, with the given number of simultaneous sequences. The process is tuned
like a server's. Otherwise a garbage collection would sometimes visit all objects of the libraries, in runs of either
kind.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import planned_checkpoint
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from dev.bench.steps import sizes

if TYPE_CHECKING:
    from rich.console import Console

    from bridle import LLM

_BATCHES = (1, 64)
THREADS = 1
#: Rough seconds for `MachineLimits.python`: loading, a step, and a sequence in a step.
_LOAD_SECONDS, _STEP_SECONDS, _SEQUENCE_SECONDS = 3.0, 2e-3, 0.1e-3


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Return the processor seconds without a trace, and the cost of tracing, for each number of sequences."""
    from bridle import LLM
    from bridle.http.server.process_tuning import tune_process

    num_tokens, rounds = _scale(settings)
    figures = []
    for name in ("demo", *sizes(settings)):
        with phases.part(name), tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
            source = name if name == "demo" else _made(name, Path(folder))
            with LLM(source, kv_memory=256 << 20) as llm:
                tune_process(max_connections=0)
                for batch in settings.batches or _BATCHES:
                    figures.append({"model": name, "batch": batch, **_beside(llm, batch, num_tokens, rounds)})
    _print_table(console, figures)
    return {"num_tokens": num_tokens, "rounds": rounds, "figures": figures}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each model, for rounds with a trace and without. A step of the demo model spends
    its time mostly in Python, not in reading memory."""
    num_tokens, rounds = _scale(settings)
    batches = settings.batches or _BATCHES
    python = num_tokens * sum(_STEP_SECONDS + batch * _SEQUENCE_SECONDS for batch in batches)
    found = {"demo": 0.0}
    for checkpoint in map(planned_checkpoint, sizes(settings)):
        found[checkpoint.name] = sum(
            limits.seconds(checkpoint, batch * (5 + num_tokens), num_tokens) for batch in batches
        )
    start = limits.python(_LOAD_SECONDS)
    return {name: start + 2 * (rounds + 1) * (more + limits.python(python)) for name, more in found.items()}


def _scale(settings: BenchSettings) -> tuple[int, int]:
    """Return the numbers of new tokens and of rounds."""
    return (32, 3) if settings.quick else (64, 40)


def _made(name: str, folder: Path) -> str:
    """Make a model of that size, with a tokenizer; return its path."""
    from bridle.bench.checkpoints import make_checkpoint
    from bridle.bench.control_guests import write_tokenizer

    made = make_checkpoint(name, folder)
    write_tokenizer(made.path, made.vocab_size)
    return str(made.path)


def _beside(llm: LLM, batch: int, num_tokens: int, rounds: int) -> dict[str, float]:
    """Measure both kinds of runs in turns. Every other round begins with the other kind of run. The first round warms
    up."""
    runs: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for traced in (number % 2 == 0, number % 2 == 1):
            seconds = _seconds(llm, batch, num_tokens, traced=traced)
            if number:
                runs[traced].append(seconds)
    share = median(on / off - 1 for off, on in zip(runs[False], runs[True], strict=True))
    return {"off_seconds": median(runs[False]), "on_seconds": median(runs[True]), "share": share}


def _seconds(llm: LLM, batch: int, num_tokens: int, *, traced: bool) -> float:
    prompts = [[5, 6, 7, 8, number % 100] for number in range(batch)]
    began = time.process_time()
    llm.generate(prompts, max_tokens=num_tokens, ignore_eos=True, seed=1, trace=traced, use_tqdm=False)
    return time.process_time() - began


def _print_table(console: Console, figures: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("model", "sequences", "without, s", "with, s", "more", title="what a trace costs (processor time)")
    for each in figures:
        numbers = (f"{each['off_seconds']:.3f}", f"{each['on_seconds']:.3f}", f"{100 * each['share']:+.1f} %")
        table.add_row(each["model"], str(each["batch"]), *numbers)
    console.print(table)
