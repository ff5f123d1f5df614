"""What scripts cost: `bridle bench controllers`.

A script in JavaScript and one in Python, each of which keeps its text to a regular expression, on the standard
controllers. For each: compiling the interpreter (once for a machine), starting a script, memory of each, processor
time of a step, and what it adds to the critical path of a step beside a device that takes 20 ms. Forks have lines of
their own: from the script's wish until every branch has drawn, and what each branch takes.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.aici.client import RuntimePool, WasmController
from bridle.bench import control_guests as guests
from bridle.bench.control_device import (
    Borrowed,
    TimedDevice,
    check,
    critical_path,
    drain,
    group_cpu,
    runtime_pool,
)
from bridle.bench.phases import MachineLimits, Phases
from bridle.config import EngineConfig
from bridle.controllers.standard import names
from bridle.engine import Engine, Request
from bridle.outputs import Forked
from bridle.sampling import SamplingParams
from dev.bench.control_costs import group_memory

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.bench.settings import BenchSettings

_VOCAB_SIZE = 32_000
_BATCHES = (1, 10, 40)
_DEVICE_SECONDS = 0.020
_PATIENCE = 600.0  # seconds for an interpreter to be compiled
#: Nobody is late here: what is measured is how long things take.
_LIMITS = ("--wasm-max-step-time", "2000", "--wasm-max-init-time", "20000", "--limit", "max_prepare_wait=600000")


@dataclass(frozen=True, slots=True)
class Script:
    """A script that goes on for ever, and one that forks into `%d` first. Its seconds are rough, as
    `MachineLimits.python` has them: its interpreter compiled, a script started, and one of its steps."""

    controller: str
    plain: str
    forking: str
    compile_seconds: float
    start_seconds: float
    step_seconds: float


SCRIPTS = {
    "JavaScript": Script(
        "jsctrl",
        "start(async () => { await gen({ regex: /[a-z ]+/, maxTokens: 1000000 }) })",
        "start(async () => { await gen({ maxTokens: 4 }); await fork(%d);"
        " await gen({ regex: /[a-z ]+/, maxTokens: 1000000 }) })",
        compile_seconds=1.0,
        start_seconds=0.02,
        step_seconds=0.0004,
    ),
    "Python": Script(
        "pyctrl",
        "import pyaici.server as aici\n\n"
        "async def main():\n    await aici.gen_tokens(regex='[a-z ]+', max_tokens=1000000)\n\n"
        "aici.start(main())\n",
        "import pyaici.server as aici\n\n"
        "async def main():\n    await aici.gen_tokens(max_tokens=4)\n    await aici.fork(%d)\n"
        "    await aici.gen_tokens(regex='[a-z ]+', max_tokens=1000000)\n\n"
        "aici.start(main())\n",
        compile_seconds=4.0,
        start_seconds=0.1,
        step_seconds=0.0008,
    ),
}


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Figures of each language whose controller ships."""
    scripts = _scripts()
    starts, steps, forks = [], [], []
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as name:
        tokenizer = guests.write_tokenizer(Path(name) / "tokenizer", _VOCAB_SIZE)
        with runtime_pool(tokenizer, Path(name) / "store", _VOCAB_SIZE, *_LIMITS) as pool:
            for language, script in scripts.items():
                with phases.part(f"{language}: compiling and starting {script.controller}"):
                    starts.append({"language": language, **_starts(pool, script, _num_starts(settings))})
            for batch in settings.batches or _BATCHES:
                with phases.part(f"steps and forks, {batch} at once"):
                    free = critical_path(pool, None, batch, _num_steps(settings), _DEVICE_SECONDS, blocks=True)
                    for language, script in scripts.items():
                        steps.append({"language": language, **_steps(pool, script, batch, free.gap, settings)})
                        if batch > 1:
                            forks.append({"language": language, **_forks(pool, script, batch)})
    figures = {"starts": starts, "steps": steps, "forks": forks}
    _print_tables(console, figures)
    return figures


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """About how many seconds each part takes: an interpreter is compiled once, scripts start one after the other, and a
    step waits for its device and for the scripts."""
    found = {
        f"{language}: compiling and starting {script.controller}": limits.python(
            script.compile_seconds + (5 + _num_starts(settings)) * script.start_seconds
        )
        for language, script in _scripts().items()
    }
    for batch in settings.batches or _BATCHES:
        seconds = (_num_steps(settings) + 10) * _DEVICE_SECONDS
        for script in _scripts().values():
            steps = 2 * (_num_steps(settings) + 10) + (20 if batch > 1 else 0)
            opened = (2 if batch == 1 else 3) * batch * script.start_seconds
            seconds += steps * _DEVICE_SECONDS + limits.python(steps * batch * script.step_seconds + opened)
        found[f"steps and forks, {batch} at once"] = seconds
    return found


def _scripts() -> dict[str, Script]:
    """Those whose controller ships."""
    return {language: script for language, script in SCRIPTS.items() if script.controller in names()}


def _num_steps(settings: BenchSettings) -> int:
    return 30 if settings.quick else 200


def _num_starts(settings: BenchSettings) -> int:
    return 5 if settings.quick else 20


# -- starting ----------------------------------------------------------------------------------------------


def _starts(pool: RuntimePool, script: Script, count: int) -> dict[str, Any]:
    """Compilation, then scripts started one after the other, and what they hold together."""
    compiled = _open(pool, script, "first")
    for number in range(4):  # workers that start meanwhile are not the script's
        _open(pool, script, f"early-{number}")
    before = group_memory(pool.runtime_pid)
    times = [_open(pool, script, f"more-{number}") for number in range(count)]
    after = group_memory(pool.runtime_pid)
    return {
        "compile_seconds": compiled - median(times),
        "start_milliseconds": 1e3 * median(times),
        "start_worst_milliseconds": 1e3 * max(times),
        "kilobytes": max(after - before, 0) // count // 1024,
    }


def _open(pool: RuntimePool, script: Script, name: str) -> float:
    """Seconds until a script stands at its first step."""
    controller = WasmController(script.controller, script.plain)
    request = Request(f"{script.controller}-{name}", (1, 2, 3), SamplingParams(), controller=controller)
    begin = time.perf_counter()
    pool.open(request).result(_PATIENCE)
    return time.perf_counter() - begin


# -- steps -------------------------------------------------------------------------------------------------


def _steps(pool: RuntimePool, script: Script, batch: int, free_gap: float, settings: BenchSettings) -> dict[str, Any]:
    """Beyond no controller at all. Processor time is that of the whole runtime, its openings left out."""
    num_steps = _num_steps(settings)
    path = critical_path(pool, script.controller, batch, num_steps, _DEVICE_SECONDS, blocks=True, argument=script.plain)
    cpu = _cpu_of_steps(pool, script, batch, num_steps)
    return {
        "sequences": batch,
        "added_milliseconds": 1e3 * (path.gap - free_gap),
        "p99_milliseconds": 1e3 * (path.gap_p99 - free_gap),
        "drawing": path.rows,
        "cpu_microseconds_of_each": 1e6 * cpu,
    }


def _cpu_of_steps(pool: RuntimePool, script: Script, batch: int, num_steps: int) -> float:
    """Processor seconds of the runtime for each sequence and step."""
    device, engine = _engine(pool, script.plain, script, batch, num_steps)
    while len(device.gaps) < 10:
        check(engine.step())
    before, begin = group_cpu(pool.runtime_pid), len(device.gaps)
    while len(device.gaps) < begin + num_steps:
        check(engine.step())
    used = group_cpu(pool.runtime_pid) - before
    drawn = sum(device.rows[begin:])
    drain(engine, pool)
    return used / drawn


def _engine(
    pool: RuntimePool, argument: str, script: Script, batch: int, num_steps: int, count: int | None = None
) -> tuple[TimedDevice, Engine]:
    """An engine with `count` requests (default: one for each of `batch` sequences) that run a script."""
    device = TimedDevice(batch, num_steps + 256, _DEVICE_SECONDS, blocks=True)
    engine = Engine(device, EngineConfig(step_timeout=5.0), pools=[Borrowed(pool)])
    sampling = SamplingParams(max_tokens=num_steps + 128, ignore_eos=True)
    for number in range(batch if count is None else count):
        controller = WasmController(script.controller, argument)
        engine.add(Request(f"{id(device)}-{number}", (1, 2, 3), sampling, controller=controller, detokenize=False))
    return device, engine


# -- forks -------------------------------------------------------------------------------------------------


def _forks(pool: RuntimePool, script: Script, branches: int) -> dict[str, Any]:
    """One script forks: time from the step that hears of it to the one in which all draw, less the device's own."""
    device, engine = _engine(pool, script.forking % branches, script, branches, 64, count=1)
    while len(device.gaps) < 2:
        check(engine.step())
    before = group_memory(pool.runtime_pid)
    begin, at = 0.0, 0
    while not device.rows or device.rows[-1] < branches:
        started, number = time.perf_counter(), len(device.gaps)
        events = engine.step()
        check(events)
        if not begin and any(isinstance(event, Forked) for event in events):
            begin, at = started, number
    seconds = time.perf_counter() - begin - _DEVICE_SECONDS * (len(device.gaps) - at)
    held = group_memory(pool.runtime_pid) - before
    first = len(device.gaps)
    while len(device.gaps) < first + 20:
        check(engine.step())
    drain(engine, pool)
    return {
        "branches": branches,
        "fork_milliseconds": 1e3 * seconds,
        "each_milliseconds": 1e3 * seconds / (branches - 1),
        "step_gap_milliseconds": 1e3 * median(device.gaps[first:]),
        "kilobytes_of_each": max(held, 0) // (branches - 1) // 1024,
    }


# -- showing -----------------------------------------------------------------------------------------------


def _print_tables(console: Console, figures: dict[str, Any]) -> None:
    from bridle.bench.control import print_table

    print_table(console, "starting a script", figures["starts"])
    print_table(console, "a step of 20 ms, beyond no control", figures["steps"])
    print_table(console, "one script forks", figures["forks"])
