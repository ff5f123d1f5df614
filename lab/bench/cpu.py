"""What a CPU gives: decoding and prompts in every form of weights, through the whole engine, and what stands on it.

Models have real shapes and random weights, made on the spot. Beside bridle's forms stand llama.cpp, behind the same
engine over the very same files, where `llama-cpp-python` is installed, and transformers' `generate`. Peers of a part
take turns, and memory and arithmetic units are measured in between. Over the engine stand HTTP with 16 streams beside
the same engine without it, what controllers cost, and LMTP beside LMQL's own server, where that is installed.

Parts are measured one by one, and with `folder` each is kept as soon as it is done.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import Checkpoint
from bridle.bench.engine import set_up
from bridle.bench.phases import show_seconds
from bridle.bench.settings import Settings
from bridle.model.memory import return_memory
from lab.bench.cpu_files import describe_llamacpp, made_checkpoint
from lab.bench.cpu_limits import Limits
from lab.bench.cpu_parts import Part, guess_seconds, parts
from lab.bench.cpu_peers import load_peers
from lab.bench.cpu_race import as_rows, race
from lab.bench.cpu_report import draw, print_limits, print_race
from lab.bench.cpu_services import SERVICE
from lab.bench.cpu_store import Store

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[Part, float], None]


def measure(settings: Settings, console: Console) -> dict[str, Any]:
    """Measure all parts that are wanted and not there yet. Prints a table for each as it goes."""
    set_up(settings)
    wanted = parts(settings)
    with ExitStack() as stack:
        folder = settings.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridle-bench-")))
        store = Store(folder, settings)
        left = [part for part in wanted if store.find(part.name) is None]
        for line in _announce(wanted, left):
            console.print(line)
        for model, of_model in groupby(left, key=lambda part: part.model):
            _measure_model(made_checkpoint(model, folder), list(of_model), folder, store, settings, console)
        records = [record for part in wanted if (record := store.find(part.name)) is not None]
    if settings.report is not None:
        draw(records, settings.report)
    return {"llama_cpp": describe_llamacpp(), "parts": records}


def _announce(wanted: list[Part], left: list[Part]) -> Iterator[str]:
    if len(left) < len(wanted):
        yield f"{len(wanted) - len(left)} of {len(wanted)} parts are measured already"
    found = describe_llamacpp()
    if found is None:
        yield "llama.cpp is not installed (llama-cpp-python) or cannot be given files (gguf): nothing stands beside"
    else:
        built = "for this processor" if found["is_native"] else f"without {', '.join(found['lacks'])} of this processor"
        yield f"llama.cpp: llama-cpp-python {found['version']}, built {built}"


def _measure_model(
    checkpoint: Checkpoint, wanted: list[Part], folder: Path, store: Store, settings: Settings, console: Console
) -> None:
    limits = Limits()
    limits.look()
    guesses = {part.name: guess_seconds(part, checkpoint, limits, settings) for part in wanted}
    console.print(
        f"{checkpoint.name}: {len(wanted)} parts, about {show_seconds(sum(guesses.values()))} "
        "if the machine stays as busy as it is now"
    )
    with _bar(console, guesses) as progress:
        for (group, is_race), members in groupby(wanted, key=lambda part: (part.group, part.case is not None)):
            if is_race:
                _race_group(checkpoint, list(members), folder, store, settings, console, progress)
                continue
            for part in members:
                begin = time.perf_counter()
                found = SERVICE[group](checkpoint, folder, settings, console)
                store.keep({"part": part.name, "service": found}, time.perf_counter() - begin)
                progress(part, time.perf_counter() - begin)


def _race_group(
    checkpoint: Checkpoint,
    wanted: list[Part],
    folder: Path,
    store: Store,
    settings: Settings,
    console: Console,
    progress: Progress,
) -> None:
    """Parts over the same peers, which are loaded once."""
    with load_peers(checkpoint, folder, wanted, settings) as peers:
        for part in wanted:
            begin = time.perf_counter()
            present = {name: peers[name] for name in part.peers if name in peers}
            if not present:
                store.keep({"part": part.name, "figures": []}, 0.0)
                continue
            figures, limits = race(checkpoint, present, part, settings)
            return_memory()
            seconds = time.perf_counter() - begin
            store.keep({"part": part.name, "limits": limits, "figures": as_rows(figures)}, seconds)
            print_race(console, part, figures)
            print_limits(console, limits)
            progress(part, seconds)


@contextmanager
def _bar(console: Console, guesses: dict[str, float]) -> Iterator[Progress]:
    """A bar that moves with the guessed time of parts, and corrects what is left by what parts took."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    total = sum(guesses.values())
    done = spent = 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(next(iter(guesses)), total=total)

        def report(part: Part, seconds: float) -> None:
            nonlocal done, spent
            done, spent = done + guesses[part.name], spent + seconds
            left = (total - done) * spent / done
            bar.update(task, completed=done, description=f"after {part.name}: {show_seconds(left)} left")

        yield report
