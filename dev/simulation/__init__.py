"""Simulates hundreds of replicas and a million requests in virtual time, with the real routing, over real or modelled
engines.

    outcome = simulate(Scenario(Workload(num_requests=10_000, rate=50.0), num_replicas=25, cost=cost))

Clients, admission, fairness, `ReplicaSet` and the router are those of a server. Only parts that take time or memory are
simulated: the network, the device, and with `core="quick"` the engine. The simulation reads no clock and never sleeps,
and all results follow from the seed.
"""

from __future__ import annotations

from dev.simulation.cost import SimulatedStepCost, StepSize, fit
from dev.simulation.outcome import Outcome
from dev.simulation.policies import POLICIES
from dev.simulation.replica import Timing
from dev.simulation.scenario import Scenario, Simulation, simulate
from dev.simulation.workload import Lengths, Workload

__all__ = [
    "POLICIES",
    "Lengths",
    "Outcome",
    "Scenario",
    "Simulation",
    "SimulatedStepCost",
    "StepSize",
    "Timing",
    "Workload",
    "fit",
    "simulate",
]
