"""Measures the time that Wasm controllers add to a step, on a simulated device whose steps take a fixed time.

On a device that blocks (a CPU), all work between the forward pass and the sampler delays the step. The work is waiting
for controllers, decoding their answers, and branching. On a device that does not block (a GPU), the engine waits for
controllers, decodes and branches while the device computes.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bridle.aici import protocol, replies
from bridle.aici.client import RuntimeConfig, RuntimePool, WasmController
from bridle.config import EngineConfig
from bridle.controllers import Controller, PythonControllerPool
from bridle.controllers.composite_pool import with_composed
from bridle.controllers.composition import compose
from bridle.engine import Engine, Request
from bridle.engine.interfaces import DelegatingPool, ExecutorInfo
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.outputs import Event, Finished
from bridle.sampling import SamplingParams

_PROMPT_TOKENS = 16
#: Steps at the beginning that are not counted: they include openings and prompts, and the engine learns the device's
#: time.
_WARM_UP = 10


class InstantExecutor:
    """An `Executor` that computes nothing: every row samples the same token."""

    def __init__(
        self, num_seqs: int, num_tokens: int, *, block_size: int = 16, token: int = 100, vocab_size: int = 32_000
    ) -> None:
        self._token = token
        self.info = ExecutorInfo(
            model="instant",
            vocab_size=vocab_size,
            max_model_len=num_tokens,
            num_blocks=num_seqs * (num_tokens // block_size + 2),
            block_size=block_size,
            max_num_batched_tokens=max(512, 2 * num_seqs),
            max_num_seqs=num_seqs,
        )

    def forward(self, plan: StepPlan) -> None:
        """Do nothing: there is nothing to compute."""

    def sample(self, batch: SampleBatch) -> StepResult:
        return StepResult(batch.step, [self._token] * len(batch.rows), [None] * len(batch.rows))

    def reset(self) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: there is no memory to release."""


class TimedDevice(InstantExecutor):
    """An executor that computes nothing, and takes `seconds` for each step. For each step, `gaps` has the seconds from
    the end of the device's work to the sampler, at least 0. `rows` has the number of sequences that sample."""

    def __init__(self, num_seqs: int, num_tokens: int, seconds: float, *, blocks: bool) -> None:
        super().__init__(num_seqs, num_tokens)
        self.seconds, self.blocks = seconds, blocks
        self.gaps: list[float] = []
        self.rows: list[int] = []
        self._done = 0.0

    def forward(self, plan: StepPlan) -> None:
        """Record the time at which a step begins to wait."""
        self._done = time.perf_counter() + self.seconds
        if self.blocks:
            self._rest()
            self._done = time.perf_counter()

    def _rest(self) -> None:
        left = self._done - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def sample(self, batch: SampleBatch) -> StepResult:
        self.gaps.append(max(time.perf_counter() - self._done, 0.0))
        self.rows.append(len(batch.rows))
        self._rest()
        return super().sample(batch)


@contextmanager
def runtime_pool(tokenizer: Path, store: Path, vocab_size: int, *args: str) -> Iterator[RuntimePool]:
    """Start a control runtime in a separate process, and yield a controller pool that uses it."""
    extra = ("--store", str(store), "--limit", "max_forks=64", *args)
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=extra), vocab_size)
    try:
        yield pool
    finally:
        pool.shutdown()


def upload(pool: RuntimePool, wasm: bytes) -> str:
    """Store a controller in the runtime; return its id."""
    message = protocol.MkModule(binary=base64.b64encode(wasm).decode())
    return pool.call(message, replies.ModuleData).module_id


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Times in seconds, as median and 99th percentile: from the end of the device's work to the sampler, and of a whole
    step. `rows` is the mean number of sampled sequences per step. `cpu` is the processor time of this process per step,
    in seconds."""

    gap: float
    gap_p99: float
    step: float
    rows: float
    cpu: float


class Borrowed(DelegatingPool):
    """A controller pool that stays open when the engine that uses it shuts down."""

    def __init__(self, pool: RuntimePool) -> None:
        super().__init__(pool)
        self.capabilities = frozenset()

    def shutdown(self) -> None:
        """Do nothing: the pool belongs to the caller."""


def critical_path(
    pool: RuntimePool,
    module: str | None,
    num_seqs: int,
    num_steps: int,
    seconds: float,
    *,
    blocks: bool,
    argument: str = "",
    num_neutral: int = 0,
) -> CriticalPath:
    """Run `num_seqs` sequences for `num_steps` steps of a device that takes `seconds`. `num_neutral` controllers in
    Python that change nothing also steer each sequence."""
    device = TimedDevice(num_seqs, _PROMPT_TOKENS + num_steps + 64, seconds, blocks=blocks)
    vocab_size = device.info.vocab_size
    homes: list[Any] = [Borrowed(pool), PythonControllerPool(vocab_size)]
    engine = Engine(device, EngineConfig(step_timeout=0.5), pools=with_composed(homes, vocab_size))
    outer = WasmController(module, argument) if module is not None else None
    controller = compose(outer, *[Controller()] * num_neutral)
    sampling = SamplingParams(max_tokens=num_steps + 2 * _WARM_UP, ignore_eos=True)
    for number in range(num_seqs):
        prompt = tuple(100 + (number * 31 + i) % 1000 for i in range(_PROMPT_TOKENS))
        engine.add(Request(f"{id(device)}-{number}", prompt, sampling, controller=controller, detokenize=False))
    steps: list[float] = []
    cpu = 0.0
    while len(device.gaps) < num_steps + _WARM_UP and engine.has_work:
        before, begin, used = len(device.gaps), time.perf_counter(), time.process_time()
        check(engine.step())
        if len(device.gaps) > max(before, _WARM_UP):
            steps.append(time.perf_counter() - begin)
            cpu += time.process_time() - used
    drain(engine, pool)
    gaps = sorted(device.gaps[_WARM_UP:])
    rows = sum(device.rows[_WARM_UP:]) / len(gaps)
    return CriticalPath(median(gaps), gaps[int(0.99 * (len(gaps) - 1))], median(steps), rows, cpu / len(steps))


def check(events: Iterable[Event]) -> None:
    """Raise the error with which an output ended. The figures of a failed output are meaningless."""
    for event in events:
        if isinstance(event, Finished) and event.error is not None:
            raise event.error


def drain(engine: Engine, pool: RuntimePool) -> None:
    """End all requests and notify the control runtime. The next engine may then number its sequences from 0 again."""
    for request_id in engine.request_ids:
        engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    pool.settle()


def group_cpu(group: int | None) -> float:
    """Return the processor time, in seconds, of the living processes of a process group."""
    ticks = 0
    for pid in members(group):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / float(os.sysconf("SC_CLK_TCK"))


def members(group: int | None) -> list[int]:
    """Return the ids of the processes in a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
