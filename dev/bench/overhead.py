"""Measures the Python time of one engine step, outside the model: scheduling, sampling bookkeeping, events.

The fake device computes nothing and answers at once, so all of the time is the engine's own. A step generates one token
for each running sequence. In the variant `with text`, the events carry text. In the variant `controlled`, a Python
controller is asked before every token and always answers "sample".
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bridle.bench.control_device import InstantExecutor
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.engine.interfaces import ControllerPool, TextDecoder
from bridle.engine.request import Request
from bridle.sampling import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.engine import Engine

_BATCHES = (1, 64, 256)
_PROMPT_TOKENS = 32
_VOCAB_SIZE = 32_000
_STEP_SECONDS, _SEQUENCE_SECONDS = 100e-6, 15e-6  # roughly, for `MachineLimits.python`


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Return the milliseconds of processor time per step for each variant and number of sequences: the median over the
    steps."""
    num_steps = _num_steps(settings)
    gc.freeze()  # garbage collections skip the imported modules, as in a server
    figures = []
    for batch in settings.batches or _BATCHES:
        for variant, make in _VARIANTS.items():
            with phases.part(f"{variant}, {batch} at once"):
                seconds = step_seconds(batch, num_steps, make)
            figures.append(
                {
                    "variant": variant,
                    "sequences": batch,
                    "step_milliseconds": 1e3 * seconds,
                    "sequence_microseconds": 1e6 * seconds / batch,
                }
            )
    _print_table(console, figures)
    return {"num_steps": num_steps, "figures": figures}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each variant and number of sequences."""
    return {
        f"{variant}, {batch} at once": limits.python(
            0.05 + (_num_steps(settings) + 16) * (_STEP_SECONDS + batch * _SEQUENCE_SECONDS)
        )
        for batch in settings.batches or _BATCHES
        for variant in _VARIANTS
    }


def _num_steps(settings: BenchSettings) -> int:
    return 50 if settings.quick else 300


MakeParts = Callable[[], tuple[list[ControllerPool], object | None, TextDecoder | None]]


def step_seconds(num_seqs: int, num_steps: int, make: MakeParts) -> float:
    """Return the median processor seconds of a step in which each of `num_seqs` sequences gets a token."""
    from bridle.config import EngineConfig
    from bridle.engine import Engine

    length = _PROMPT_TOKENS + num_steps + 64
    pools, controller, decoder = make()
    executor = InstantExecutor(num_seqs, length)
    engine = Engine(executor, EngineConfig(enable_prefix_caching=True), pools=pools, decoder=decoder)
    sampling = SamplingParams(max_tokens=num_steps + 32, ignore_eos=True)
    for number in range(num_seqs):
        prompt = tuple((number * 7919 + i * 31) % _VOCAB_SIZE for i in range(_PROMPT_TOKENS))
        engine.add(Request(str(number), prompt, sampling, controller=controller, detokenize=decoder is not None))
    try:
        return _median_step(engine, num_seqs, num_steps)
    finally:
        engine.close()


def _median_step(engine: Engine, num_seqs: int, num_steps: int) -> float:
    """Return the median over steps in which all sequences got a token; steps of prefill and the last steps do not
    count."""
    from bridle.outputs import TokenEvent

    times: list[float] = []
    while engine.has_work and len(times) < num_steps:
        begin = time.thread_time()
        events = engine.step()
        seconds = time.thread_time() - begin
        if sum(isinstance(event, TokenEvent) for event in events) == num_seqs:
            times.append(seconds)
    if not times:
        raise RuntimeError(f"no step advanced all of {num_seqs} sequences")
    return sorted(times)[len(times) // 2]


def _plain() -> tuple[list[ControllerPool], object | None, TextDecoder | None]:
    return [], None, None


def _with_text() -> tuple[list[ControllerPool], object | None, TextDecoder | None]:
    from bridle.model import resolve_model
    from bridle.tokenizer import Detokenizer, Tokenizer

    return [], None, Detokenizer(Tokenizer.load(str(resolve_model("demo"))))


def _controlled() -> tuple[list[ControllerPool], object | None, TextDecoder | None]:
    from bridle.controllers import Controller, PythonControllerPool
    from bridle.engine.control.decision import Decision

    class Sampling(Controller):
        def next(self, view: Any) -> Decision:
            return Decision.sample()

    return [PythonControllerPool(_VOCAB_SIZE)], Sampling(), None


_VARIANTS: dict[str, MakeParts] = {"plain": _plain, "with text": _with_text, "controlled": _controlled}


def _print_table(console: Console, figures: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="engine time per step, without the model")
    for heading in ("sequences", "", "ms per step", "us per sequence"):
        table.add_column(heading, justify="left" if not heading else "right")
    for figure in figures:
        table.add_row(
            str(figure["sequences"]),
            figure["variant"],
            f"{figure['step_milliseconds']:.3f}",
            f"{figure['sequence_microseconds']:.1f}",
        )
    console.print(table)
