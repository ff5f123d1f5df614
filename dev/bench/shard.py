"""Measures the cost of running a model in another process: a step on a shard compared to the same step in this process.

Both executors run the same decode steps in turn, so that a busy machine slows both. The device `instant` computes
nothing, so the result is the whole overhead, including that of the sample rows. The device `5 ms` is busy for 5 ms
without using the CPU, like a GPU. So sample rows and masks are sent during the forward pass. The third device is the
demo model, which computes on the CPU. Each masked row carries its own mask over a vocabulary of 32,000 tokens (the demo
model's vocabulary is smaller). The same run measures gRPC alone, with the same messages and an empty handler.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from bridle.bench.control_device import InstantExecutor
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.engine.control.decision import mask_words
from bridle.engine.interfaces import Executor
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, StepPlan, StepResult
from bridle.sampling import SamplingParams
from dev.bench.grpc_echo import measure_echo

if TYPE_CHECKING:
    from rich.console import Console

_BATCHES = (1, 64, 256)
_PROMPT = tuple(range(3, 35))
_SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)
_MAX_SEQS, _MAX_TOKENS = 256, 1024
_ECHO = "gRPC alone"
#: Rough seconds for `MachineLimits.python`: a shard's start, an exchange over gRPC, a row of a step, and a row that the
#: demo model computes.
_START_SECONDS, _ECHO_SECONDS, _ROW_SECONDS, _DEMO_SECONDS = 2.0, 0.5e-3, 10e-6, 0.4e-3


class Decoding:
    """Sequences that get one token each in every step, without an engine, so that only the executor is measured."""

    def __init__(self, executor: Executor, num_seqs: int, is_masked: bool) -> None:
        self._executor = executor
        self._step = 0
        self._length = len(_PROMPT)
        self._blocks = [0] * num_seqs
        self._next_block = 0
        words = mask_words(executor.info.vocab_size)
        random = Random(0)
        self._masks = [random.randbytes(4 * words) if is_masked else None for _ in range(num_seqs)]
        executor.reset()
        self._run(_PROMPT, 0)

    def step(self) -> float:
        """Compute one more token for each sequence; return the seconds."""
        self._length += 1
        return self._run((5,), self._length - 1)

    def _run(self, tokens: tuple[int, ...], start: int) -> float:
        self._step += 1
        rows = [self._row(seq_id, tokens, start) for seq_id in range(len(self._blocks))]
        plan = StepPlan(self._step, rows)
        samples = [
            SampleRow(seq_id, seq_id, _SAMPLING, key=seq_id, draw=self._step, mask=mask)
            for seq_id, mask in enumerate(self._masks)
        ]
        batch = SampleBatch(self._step, samples)
        began = time.perf_counter()
        self._executor.forward(plan)
        self._executor.sample(batch)
        return time.perf_counter() - began

    def _row(self, seq_id: int, tokens: tuple[int, ...], start: int) -> PlanRow:
        num_kept, needed = self._blocks[seq_id], -(-(start + len(tokens)) // self._executor.info.block_size)
        fresh = tuple(range(self._next_block, self._next_block + needed - num_kept))
        self._next_block += len(fresh)
        self._blocks[seq_id] = needed
        return PlanRow(seq_id, start, len(tokens), 1, start, tokens, num_kept, fresh, len(_PROMPT))


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Return the milliseconds of a step in this process and on a shard, as medians over alternating steps."""
    num_steps, batches = _num_steps(settings), _batches(settings)
    figures = []
    with phases.part(_ECHO):
        echo = measure_echo(10 * num_steps)
    devices: dict[str, Callable[[BenchSettings], Any]] = {
        "instant": partial(_timed_pair, 0.0),
        "5 ms": partial(_timed_pair, 0.005),
        "demo model": _demo_pair,
    }
    for device, pair in devices.items():
        with phases.part(device), pair(settings) as (local, remote):
            for batch in batches:
                for is_masked in (False, True):
                    figures.append(
                        {"device": device, "rows": batch, "masked": is_masked}
                        | _compare(Decoding(local, batch, is_masked), Decoding(remote, batch, is_masked), num_steps)
                    )
    _print_table(console, figures)
    console.print(f"gRPC alone, the messages of 64 unmasked rows with nothing done: {echo:.3f} ms")
    return {"num_steps": num_steps, "grpc_milliseconds": echo, "figures": figures}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each device: its start, and steps in this process and on a shard, with masks and
    without."""
    num_steps = 2 * 2 * (_num_steps(settings) + 5)
    batches = _batches(settings)

    def steps(device_seconds: float, row_seconds: float) -> float:
        return num_steps * (len(batches) * device_seconds + limits.python(sum(batches) * row_seconds))

    return {
        _ECHO: limits.python(2.0 + 10 * _num_steps(settings) * _ECHO_SECONDS),
        "instant": limits.python(_START_SECONDS) + steps(0.0, _ROW_SECONDS),
        "5 ms": limits.python(_START_SECONDS) + steps(0.005, _ROW_SECONDS),
        "demo model": limits.python(_START_SECONDS) + steps(0.0, _DEMO_SECONDS),
    }


def _num_steps(settings: BenchSettings) -> int:
    return 30 if settings.quick else 400


def _batches(settings: BenchSettings) -> tuple[int, ...]:
    return settings.batches or ((64,) if settings.quick else _BATCHES)


def _compare(local: Decoding, remote: Decoding, num_steps: int) -> dict[str, float]:
    for _ in range(5):
        local.step()
        remote.step()
    pairs = [(local.step(), remote.step()) for _ in range(num_steps)]
    return {
        "local_milliseconds": 1e3 * statistics.median(one for one, _ in pairs),
        "shard_milliseconds": 1e3 * statistics.median(other for _, other in pairs),
        "overhead_milliseconds": 1e3 * statistics.median(other - one for one, other in pairs),
    }


class TimedExecutor(InstantExecutor):
    """A fake device that is busy for `seconds` with each step, without using the CPU meanwhile."""

    def __init__(self, seconds: float) -> None:
        super().__init__(_MAX_SEQS, _MAX_TOKENS)
        self._seconds = seconds
        self._busy_until = 0.0

    def forward(self, plan: StepPlan) -> None:
        self._busy_until = time.perf_counter() + self._seconds

    def sample(self, batch: SampleBatch) -> StepResult:
        """Wait until the device has computed the step. The method sleeps first and then polls the clock, because a
        sleep is not exact."""
        if self._seconds:
            time.sleep(max(self._busy_until - time.perf_counter() - 0.0005, 0))
            while time.perf_counter() < self._busy_until:
                pass
        return super().sample(batch)


@contextmanager
def _timed_pair(seconds: float, settings: BenchSettings) -> Iterator[tuple[Executor, Executor]]:
    from bridle.launch.launcher import LaunchedShard

    with ExitStack() as stack:
        command = [sys.executable, "-m", "dev.bench.timed_shard", "--seconds", str(seconds)]
        remote = LaunchedShard(command, name="timed shard")
        stack.callback(remote.close)
        yield TimedExecutor(seconds), remote


@contextmanager
def _demo_pair(settings: BenchSettings) -> Iterator[tuple[Executor, Executor]]:
    from bridle.config import ModelConfig
    from bridle.launch.launcher import launch_shard
    from bridle.model import load_executor

    block_size = 16
    config = ModelConfig(
        "demo", block_size=block_size, num_blocks=_MAX_SEQS * (_MAX_TOKENS // block_size), num_threads=settings.threads
    )
    with ExitStack() as stack:
        local = load_executor(config)
        stack.callback(local.close)
        remote = launch_shard(config)
        stack.callback(remote.close)
        yield local, remote


def _print_table(console: Console, figures: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="a step in this process and through a shard, in ms")
    for heading in ("device", "rows", "masks", "here", "shard", "overhead"):
        table.add_column(heading, justify="left" if heading == "device" else "right")
    for figure in figures:
        names = ("local_milliseconds", "shard_milliseconds", "overhead_milliseconds")
        times = (f"{figure[name]:.3f}" for name in names)
        table.add_row(figure["device"], str(figure["rows"]), "yes" if figure["masked"] else "no", *times)
    console.print(table)
