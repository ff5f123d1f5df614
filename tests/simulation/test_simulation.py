"""Properties of whole simulations: results follow from the seed, and the simplified engine is close to the real engine.
The simulated clients check that no token is lost, doubled or sent to another client."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from bridle.errors import InternalError, InvalidRequest
from dev.simulation import Outcome, Scenario, Simulation, Workload, simulate
from dev.simulation.engine_core import EngineCore
from tests.simulation.kit import COST, CheckedExecutor, ForgetfulExecutor, make_scenario


def facts(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome without the run time of the simulation."""
    return asdict(replace(outcome, wall_seconds=0.0, cpu_seconds=0.0))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("core", "policy"), [("engine", "prefix"), ("quick", "prefix"), ("quick", "least loaded"), ("quick", "random")]
)
def test_every_request_is_answered_once_whatever_is_lost(core: Any, policy: str) -> None:
    outcome = simulate(make_scenario(core=core, policy=policy, mean_life=6.0, seed=3))
    assert outcome.num_losses >= 5
    assert (outcome.num_answered, outcome.num_failed) == (200, 0)


def test_plans_keep_the_contract_and_blocks_come_back() -> None:
    simulation = Simulation(make_scenario(80, core="engine", mean_life=4.0, num_blocks=300), CheckedExecutor)
    outcome = simulation.run()
    assert outcome.num_losses
    for replica in simulation.replicas:
        assert isinstance(replica.core, EngineCore)
        replica.core.engine.check_integrity()
        executor = replica.core.executor
        assert isinstance(executor, CheckedExecutor)
        assert not executor.scripted.violations
        assert executor.scripted.num_forwards


def test_a_wrong_token_does_not_go_unnoticed() -> None:
    with pytest.raises(InternalError, match=r"got \d+ as token \d+ of \d+, not \d+"):
        Simulation(make_scenario(core="engine"), ForgetfulExecutor).run()


@pytest.mark.parametrize("core", ["engine", "quick"])
def test_a_seed_says_it_all(core: Any) -> None:
    scenario = make_scenario(60, core=core, mean_life=10.0, burst=4.0)
    assert facts(simulate(scenario)) == facts(simulate(scenario))
    other = replace(scenario, workload=replace(scenario.workload, seed=1))
    assert facts(simulate(other)) != facts(simulate(scenario))


def compare(scenario: Scenario, *, time: float, rate: float) -> None:
    """Compare simulations with the real and the simplified engine. Times may differ by the share `time`, hit rates by
    `rate`."""
    engine = simulate(replace(scenario, core="engine"))
    quick = simulate(replace(scenario, core="quick"))
    for measure in ("ttft", "latency", "pace"):
        ours, theirs = getattr(quick, measure), getattr(engine, measure)
        for name in ("mean", "p50", "p90"):
            assert ours[name] == pytest.approx(theirs[name], rel=time), (measure, name)
    assert quick.hit_rate == pytest.approx(engine.hit_rate, abs=rate)
    assert quick.busy == pytest.approx(engine.busy, rel=time)
    assert quick.num_tokens == pytest.approx(engine.num_tokens, rel=time)


def test_the_model_is_the_engine_where_there_is_room() -> None:
    compare(make_scenario(120, rate=8.0), time=1e-3, rate=1e-3)


def test_the_model_is_close_to_the_engine_under_load_and_where_blocks_are_scarce() -> None:
    compare(make_scenario(400, rate=40.0, num_blocks=700, burst=3.0), time=0.15, rate=0.07)


def test_affinity_finds_more_than_its_rivals() -> None:
    found = {
        policy: simulate(make_scenario(900, 6, 30.0, num_blocks=250, policy=policy)).hit_rate
        for policy in ("prefix", "least loaded", "random")
    }
    assert found["prefix"] > 1.3 * max(found["least loaded"], found["random"])


def test_a_full_house_turns_away_and_takes_in_later() -> None:
    outcome = simulate(make_scenario(150, 1, 40.0, crowd=0.15))
    assert outcome.num_turned_away > 10
    assert outcome.num_answered + outcome.num_failed == 150
    assert outcome.num_answered > 100


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no policy is called 'best'; there are prefix, least loaded, random"):
        Scenario(Workload(1, 1.0), 1, COST, policy="best")
    with pytest.raises(InvalidRequest, match="num_replicas is 0"):
        Scenario(Workload(1, 1.0), 0, COST)
