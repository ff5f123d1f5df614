"""Measures the slowdown by controllers on a real forward pass on the CPU."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from bridle.aici.client import RuntimePool, WasmController
from bridle.bench import control_guests as guests
from bridle.bench.control_device import Borrowed, drain, group_cpu, upload
from bridle.config import EngineConfig, ModelConfig
from bridle.engine import Engine, Request
from bridle.engine.interfaces import Executor
from bridle.outputs import TokenEvent
from bridle.sampling import SamplingParams

#: Sampling in which only controllers end an output, with enough tokens for those that controllers force.
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3_400)


def load(path: Path, num_threads: int | None) -> Executor:
    """Return the executor of a model in this process."""
    from bridle.model import load_executor

    config = ModelConfig(model=str(path), device="cpu", dtype="float32", num_threads=num_threads, kv_memory=1 << 30)
    return load_executor(config)


class KeptExecutor:
    """An executor that stays open when the engine that uses it closes."""

    def __init__(self, executor: Executor) -> None:
        executor.reset()
        self.info = executor.info
        self.forward, self.sample, self.reset = executor.forward, executor.sample, executor.reset

    def close(self) -> None:
        """Do nothing: the executor belongs to the caller."""


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    """Return `length` arbitrary tokens, which differ for each `number`."""
    return tuple(300 + (number * 7_919 + i * 31) % 7_000 for i in range(length))


def slowdown_scale(*, quick: bool) -> tuple[int, int]:
    """Return the number of measured steps and the number of rounds."""
    return (24, 2) if quick else (64, 5)


def slowdown(executor: Executor, pool: RuntimePool, *, quick: bool) -> list[dict[str, Any]]:
    """Return the slowdown of 8 sequences under each controller, compared with no controller, and the processor time of
    the controllers. The runs take turns; figures are medians."""
    modules = {"none": None, "trivial": upload(pool, guests.trivial()), "walk": upload(pool, guests.walk())}
    num_steps, rounds = slowdown_scale(quick=quick)
    runs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in modules}
    for _ in range(rounds):
        for kind, module in modules.items():
            runs[kind].append(_speed(executor, pool, module, num_steps))
    base = median(seconds for seconds, _ in runs["none"])
    return [
        {
            "controller": kind,
            "step_milliseconds": 1e3 * (seconds := median(s for s, _ in values)),
            "slowdown": seconds / base,
            "controller_cpu_milliseconds_per_step": 1e3 * median(cpu for _, cpu in values),
        }
        for kind, values in runs.items()
    ]


def _speed(executor: Executor, pool: RuntimePool, module: str | None, num_steps: int) -> tuple[float, float]:
    """Return the seconds per step, and the processor seconds of the control runtime per step."""
    engine = Engine(KeptExecutor(executor), EngineConfig(step_timeout=0.5), pools=[Borrowed(pool)])
    controller = WasmController(module) if module else None
    for number in range(8):
        engine.add(Request(f"s{number}", prompt_of(number, 32), GREEDY, controller=controller, detokenize=False))
    steps_with(engine, 8, 5)
    cpu = group_cpu(pool.runtime_pid)
    times = steps_with(engine, 8, num_steps)
    cpu = group_cpu(pool.runtime_pid) - cpu
    drain(engine, pool)
    return median(times), cpu / num_steps


def steps_with(engine: Engine, num_tokens: int, count: int) -> list[float]:
    """Return the durations of the next `count` steps in which the engine produced at least `num_tokens` tokens."""
    times: list[float] = []
    while len(times) < count:
        begin = time.perf_counter()
        events = engine.step()
        if sum(isinstance(event, TokenEvent) for event in events) >= num_tokens:
            times.append(time.perf_counter() - begin)
    return times
