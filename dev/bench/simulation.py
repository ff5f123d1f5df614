"""Simulates many replicas in virtual time. The benchmark checks the model of an engine against the real engine, and
measures the gain of routing by prefix at several scales.

The first part runs one workload over real engines and over the engine's model, and compares the results. The other
parts use only the model. They measure growing load until replicas are full, more and more frequent losses, and a
thousand replicas with a million requests. Each routing policy gets the same chats. `--report` writes figures, plots and
the tables of a page.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from dev.simulation import POLICIES, Scenario, Workload, simulate
from dev.simulation.measured import MEASURED

if TYPE_CHECKING:
    from rich.console import Console

_SEED = 6
_REQUEST_SECONDS = {"engine": 3e-3, "quick": 0.4e-3}  # rough seconds of one request, for `MachineLimits.python`
#: Losses of each replica in an hour of virtual time.
_LOSSES = (0.0, 2.0, 6.0, 20.0)


@dataclass(frozen=True, slots=True)
class SimulationScale:
    """Scale of the simulation. Rates are requests per second and replica."""

    checked_replicas: int = 100
    checked_requests: int = 50_000
    swept_replicas: int = 50
    swept_requests: int = 15_000
    large_replicas: int = 1_000
    large_requests: int = 1_000_000
    rates: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0)
    usual_rate: float = 3.0


FULL = SimulationScale()
QUICK = SimulationScale(4, 300, 4, 300, 20, 3_000, rates=(1.0, 4.0))


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Measure all parts; the report is written again after each part."""
    from dev.bench.simulation_report import write_report

    scale = QUICK if settings.quick else FULL
    figures: dict[str, Any] = {"cost": asdict(MEASURED), "scale": asdict(scale)}
    for part, runs in _parts(scale):
        figures[part] = []
        with phases.part(part):
            for labels, scenario in runs:
                figures[part].append({**labels, **_run(scenario)})
                _print(console, part, figures[part][-1])
        if settings.report is not None:
            write_report(figures, settings.report)
    return figures


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each part: its requests, over real engines or over the model."""
    return {
        part: limits.python(
            sum(scenario.workload.num_requests * _REQUEST_SECONDS[scenario.core] for _, scenario in runs)
        )
        for part, runs in _parts(QUICK if settings.quick else FULL)
    }


Runs = Iterator[tuple[dict[str, Any], Scenario]]


def _parts(scale: SimulationScale) -> Iterator[tuple[str, Runs]]:
    """Yield the parts and their runs, the most useful part first."""
    yield "checked", _checked(scale)
    yield "load", _under_load(scale)
    yield "losses", _under_losses(scale)
    yield "large", _large(scale)


def make_scenario(scale: SimulationScale, num_replicas: int, num_requests: int, rate: float, **fields: Any) -> Scenario:
    """Return a scenario of bursty chats at `rate` requests per second and replica, with ten system prompts for each
    replica."""
    workload = Workload(
        num_requests, rate * num_replicas, seed=_SEED, num_systems=10 * num_replicas, burst=2.0, num_users=256
    )
    return Scenario(workload, num_replicas, MEASURED, **fields)


def _checked(scale: SimulationScale) -> Runs:
    usual = make_scenario(
        scale, scale.checked_replicas, scale.checked_requests, scale.usual_rate, mean_life=3_600 / _LOSSES[1]
    )
    for policy in POLICIES:
        for core in ("engine", "quick"):
            yield {"policy": policy, "core": core}, replace(usual, policy=policy, core=core)


def _under_load(scale: SimulationScale) -> Runs:
    for rate in scale.rates:
        scenario = make_scenario(scale, scale.swept_replicas, scale.swept_requests, rate)
        for policy in POLICIES:
            yield {"policy": policy, "offered": rate}, replace(scenario, policy=policy)


def _under_losses(scale: SimulationScale) -> Runs:
    usual = make_scenario(scale, scale.swept_replicas, scale.swept_requests, scale.usual_rate)
    for losses in _LOSSES:
        for policy in POLICIES:
            scenario = replace(usual, policy=policy, mean_life=3_600 / losses if losses else None)
            yield {"policy": policy, "losses_per_hour": losses}, scenario


def _large(scale: SimulationScale) -> Runs:
    usual = make_scenario(
        scale, scale.large_replicas, scale.large_requests, scale.usual_rate, mean_life=3_600 / _LOSSES[1]
    )
    for policy in POLICIES:
        yield {"policy": policy, "replicas": scale.large_replicas}, replace(usual, policy=policy)


def _run(scenario: Scenario) -> dict[str, Any]:
    outcome = simulate(scenario)
    return {key: _rounded(value) for key, value in asdict(outcome).items()}


def _rounded(value: Any) -> Any:
    """Round figures to six digits, which keeps the file small."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _print(console: Console, part: str, run: dict[str, Any]) -> None:
    name = ", ".join(
        str(run[key]) for key in ("policy", "core", "offered", "losses_per_hour", "replicas") if key in run
    )
    console.print(
        f"{time.strftime('%H:%M:%S')} {part} ({name}): {run['num_answered']} of {run['num_requests']} answered, "
        f"TTFT p50 {run['ttft']['p50']:.3f} s, p99 {run['ttft']['p99']:.3f} s, hit rate {run['hit_rate']:.1%}, "
        f"busy {run['busy']:.0%} +- {run['busy_spread']:.1%}, {run['num_losses']} losses; "
        f"{run['wall_seconds']:.1f} s here for {run['virtual_seconds']:.0f} s there",
        soft_wrap=True,
    )
