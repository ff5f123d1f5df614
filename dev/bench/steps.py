"""Cost model of an engine step: a constant, and a cost for each row, token and position of context.

Batches of several sizes run to their end; their steps combine chunks of prompts with decoding sequences. The costs are
fitted to the times of all steps. The time of each step is its minimum over the rounds. `dev.simulation` advances its
virtual time by this cost.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import BenchCheckpoint, make_checkpoint, planned_checkpoint
from bridle.bench.engine import make_prompts
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.config import EngineConfig, ModelConfig
from bridle.engine.interfaces import Executor, ExecutorInfo
from bridle.engine.request import Request
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.sampling import SamplingParams
from dev.simulation.cost import SimulatedStepCost, StepSize, fit

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.engine import Engine

_BATCHES = (1, 4, 16, 32)
CAPACITY = 1 << 15  # tokens of KV
LOAD_SECONDS = 2.0  # to load a model
THREADS = 1

Steps = list[tuple[StepSize, float]]


class NotedExecutor:
    """An `Executor` that remembers the size of its last step plan."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.last = StepSize(0, 0, 0)

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def forward(self, plan: StepPlan) -> None:
        self.last = StepSize.of(plan)
        self._executor.forward(plan)

    def sample(self, batch: SampleBatch) -> StepResult:
        return self._executor.sample(batch)

    def reset(self) -> None:
        self._executor.reset()

    def close(self) -> None:
        self._executor.close()


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Return the fitted step cost of each model, and the mean deviation of measured steps from it."""
    figures = []
    for checkpoint in checkpoints(settings, phases):
        steps = _steps_of(checkpoint, settings)
        cost, name = fit(steps), checkpoint.name
        figures.append({"model": name, "steps": len(steps), **asdict(cost), "error": cost.error(steps)})
        _print(console, name, cost, cost.error(steps))
    return {"figures": figures}


def checkpoints(settings: BenchSettings, phases: Phases) -> Iterator[BenchCheckpoint]:
    """Make the models to measure, one after the other, each within its own phase of the benchmark."""
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        for name in sizes(settings):
            checkpoint = make_checkpoint(name, Path(folder))
            with phases.part(name):
                yield checkpoint


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each model, whose prompts are read and decoded in rounds, batch after batch."""
    num_new, num_rounds = _scale(settings)
    found = {}
    for checkpoint in map(planned_checkpoint, sizes(settings)):
        found[checkpoint.name] = limits.python(LOAD_SECONDS)
        for batch in settings.batches or _BATCHES:
            num_tokens = 4 * sum(map(len, make_prompts(batch, checkpoint.vocab_size, seed=batch))) + batch * num_new
            found[checkpoint.name] += num_rounds * limits.seconds(checkpoint, num_tokens, num_new)
    return found


def sizes(settings: BenchSettings) -> tuple[str, ...]:
    """Return the sizes of the requested models, or of a small one."""
    return settings.model_sizes or ("20m",)


def _scale(settings: BenchSettings) -> tuple[int, int]:
    """Return the numbers of new tokens and of rounds."""
    return (8, 2) if settings.quick else (16, 4)


def _steps_of(checkpoint: BenchCheckpoint, settings: BenchSettings) -> Steps:
    from bridle.engine import Engine
    from bridle.model import load_executor

    num_threads, (num_new, num_rounds) = settings.threads or THREADS, _scale(settings)
    config = ModelConfig(str(checkpoint.path), num_threads=num_threads, kv_memory=CAPACITY * checkpoint.token_bytes)
    executor = NotedExecutor(load_executor(config))
    engine = Engine(executor, EngineConfig(enable_prefix_caching=False))
    steps: Steps = []
    try:
        run_batch(engine, executor, make_prompts(2, checkpoint.vocab_size), 2)  # build now what would be built lazily
        for batch in settings.batches or _BATCHES:
            prompts = [prompt * 4 for prompt in make_prompts(batch, checkpoint.vocab_size, seed=batch)]
            rounds = [run_batch(engine, executor, prompts, num_new) for _ in range(num_rounds)]
            steps += fastest(rounds)
    finally:
        engine.close()
    return [(size, seconds / num_threads) for size, seconds in steps]


def run_batch(engine: Engine, executor: NotedExecutor, prompts: Sequence[Sequence[int]], num_new: int) -> Steps:
    """Run the prompts as one batch; return the size and the seconds of each step."""
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), tuple(prompt), sampling, detokenize=False))
    steps: Steps = []
    while engine.has_work:
        began = time.process_time()
        engine.step()
        steps.append((executor.last, time.process_time() - began))
    return steps


def fastest(rounds: Sequence[Steps]) -> Steps:
    """Return the minimum time of each step, because disturbances only make steps slower. All rounds have the same
    steps."""
    return [(alike[0][0], min(seconds for _, seconds in alike)) for alike in zip(*rounds, strict=True)]


def _print(console: Console, name: str, cost: SimulatedStepCost, error: float) -> None:
    console.print(
        f"{name}: a step takes {1e3 * cost.base:.2f} ms, and {1e6 * cost.row:.1f} us for each row, "
        f"{1e6 * cost.token:.1f} us for each token, {1e9 * cost.context:.1f} ns for each position of context; "
        f"steps differ from that by {error:.0%} on average",
        soft_wrap=True,
    )
