"""Benchmark of shared prefill: the time to the first token of a short prompt while a long prompt is computed, and the
cost in throughput.

Two engines over the same model run the same loads in turns. One engine shares each step's prompt budget between
prompts, the other gives the whole budget to the oldest prompt. Counts of steps and tokens are exact on any machine.
Times are processor times, because other work on the machine affects them less than clock times; each is the minimum
over the rounds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import BenchCheckpoint, planned_checkpoint
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.config import EngineConfig, ModelConfig
from bridle.engine.request import Request
from bridle.engine.scheduling.prefill_sharing import PromptShares
from bridle.outputs import TokenEvent
from bridle.sampling import SamplingParams
from dev.bench.steps import CAPACITY, LOAD_SECONDS, checkpoints, sizes

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.engine import Engine

POLICIES = ("oldest first", "shared")
_LONG, _SHORT = 4_000, 20  # tokens of a prompt
#: Kinds of requests of the mixed load: shortest and longest prompt, and tokens of output. Every fourth request is of
#: the first kind.
_KINDS = ((1_000, 2_000, 4), (16, 64, 24), (100, 400, 8), (16, 64, 24))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives after `step` steps."""

    step: int
    request: Request


@dataclass(slots=True)
class Outcome:
    """One run of a load: its steps, computed tokens and processor seconds. `first_steps` and `first_seconds` are those
    from the arrival of the last request to its first token."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_steps: int = 0
    first_seconds: float = 0.0


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Run both loads with both engines in turns, and print the results."""
    figures = []
    for checkpoint in checkpoints(settings, phases):
        found = _measure_model(checkpoint, settings)
        _print(console, found)
        figures += found
    return {"figures": figures}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each model."""
    found = {}
    for checkpoint in map(planned_checkpoint, sizes(settings)):
        num_tokens = num_new = 0
        for arrivals in _loads(settings, checkpoint.vocab_size).values():
            num_tokens += sum(len(each.request.prompt) for each in arrivals)
            num_new += sum(each.request.sampling.max_tokens or 0 for each in arrivals)
        num_runs = _num_rounds(settings) * len(POLICIES)
        found[checkpoint.name] = limits.python(LOAD_SECONDS) + num_runs * limits.seconds(
            checkpoint, num_tokens, num_new
        )
    return found


def _num_rounds(settings: BenchSettings) -> int:
    return 2 if settings.quick else 5


def _loads(settings: BenchSettings, vocab_size: int) -> dict[str, list[Arrival]]:
    rng = random.Random(0)

    def arrival(step: int, length: int, num_new: int) -> Arrival:
        sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        prompt = tuple(rng.randrange(3, vocab_size) for _ in range(length))
        return Arrival(step, Request(str(rng.random()), prompt, sampling, detokenize=False))

    long = _LONG // 4 if settings.quick else _LONG
    mixed = []
    for number in range(12 if settings.quick else 32):
        shortest, longest, num_new = _KINDS[number % len(_KINDS)]
        mixed.append(arrival(2 * number, rng.randint(shortest, longest), num_new))
    return {"short next to long": [arrival(0, long, 1), arrival(2, _SHORT, 1)], "mixed": mixed}


def _measure_model(checkpoint: BenchCheckpoint, settings: BenchSettings) -> list[dict[str, Any]]:
    from bridle.engine import Engine
    from bridle.model import load_executor

    kv_memory = CAPACITY * checkpoint.token_bytes
    config = ModelConfig(str(checkpoint.path), num_threads=settings.threads, kv_memory=kv_memory)
    engine = Engine(load_executor(config), EngineConfig(enable_prefix_caching=False))
    figures = []
    try:
        for load, arrivals in _loads(settings, checkpoint.vocab_size).items():
            rounds: dict[str, list[Outcome]] = {policy: [] for policy in POLICIES}
            for number in range(_num_rounds(settings)):
                for policy in POLICIES if number % 2 else POLICIES[::-1]:
                    choose(engine, policy)
                    rounds[policy].append(run_load(engine, arrivals))
            for policy, outcomes in rounds.items():
                figures.append({"model": checkpoint.name, "load": load, "policy": policy, **asdict(best(outcomes))})
    finally:
        engine.close()
    return figures


class _OldestFirst(PromptShares):
    """A policy that reserves no budget for short prompts, and computes the oldest prompt first."""

    def split(self, budget: int, begun: object, order: object) -> dict[int, int]:
        return {}

    def provider(self, seq: object) -> None:
        return None


def choose(engine: Engine, policy: str) -> None:
    """Let an idle engine use the policy `policy` from now on: to share the prompt budget, or to give it to the oldest
    prompt."""
    scheduler = engine._scheduler
    scheduler._prompt_shares = (PromptShares if policy == "shared" else _OldestFirst)(scheduler.blocks)


def run_load(engine: Engine, arrivals: Sequence[Arrival]) -> Outcome:
    """Run a load until all its requests are finished."""
    outcome, left, last = Outcome(), list(arrivals), arrivals[-1]
    num_computed, began, came = engine.statistics().num_computed_tokens, time.process_time(), 0.0
    while left or engine.has_work:
        while left and left[0].step <= outcome.steps:
            came = time.process_time()
            engine.add(left.pop(0).request)
        events = engine.step()
        outcome.steps += 1
        is_first = any(isinstance(event, TokenEvent) and event.request_id == last.request.id for event in events)
        if is_first and not outcome.first_steps:
            outcome.first_steps, outcome.first_seconds = outcome.steps - last.step, time.process_time() - came
    outcome.seconds = time.process_time() - began
    outcome.tokens = engine.statistics().num_computed_tokens - num_computed
    return outcome


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the minimum times over runs of the same load."""
    first = min(outcome.first_seconds for outcome in outcomes)
    found = min(outcomes, key=lambda outcome: outcome.seconds)
    return Outcome(found.steps, found.tokens, found.seconds, found.first_steps, first)


def _print(console: Console, figures: list[dict[str, Any]]) -> None:
    for figure in figures:
        speed = figure["tokens"] / figure["seconds"]
        console.print(
            f"{figure['model']}, {figure['load']}, {figure['policy']}: {figure['tokens']} tokens in {figure['steps']} "
            f"steps, {speed:.0f} tokens/s; the last request had its first token after {figure['first_steps']} steps, "
            f"{1e3 * figure['first_seconds']:.0f} ms",
            soft_wrap=True,
        )
