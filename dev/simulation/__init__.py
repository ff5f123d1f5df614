"""Simulates hundreds of replicas and a million requests in virtual time. The routing code is real; the engines are real
or models of an engine.

    outcome = simulate(Scenario(Workload(num_requests=10_000, rate=50.0), num_replicas=25, cost=cost))

Clients, admission, fairness, `ReplicaSet` and the router run the same code as in a server. Only parts that take time or
memory are simulated: the network, the device, and with `core="quick"` also the engine. The simulation never reads a
clock or sleeps, and all results follow from the seed.
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
