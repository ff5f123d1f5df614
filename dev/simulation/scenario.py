"""One simulation: its settings, and the combination of a real router with simulated replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from bridle.distributed.replica_link import LinkOwner
from bridle.distributed.replicas import ReplicaSet
from bridle.engine.interfaces import ExecutorInfo
from bridle.errors import InternalError, InvalidRequest
from bridle.serving.tenancy.admission import Admission
from dev.simulation.clients import Clients
from dev.simulation.core import Core
from dev.simulation.cost import SimulatedStepCost
from dev.simulation.engine_core import CountingExecutor, EngineCore, MakeExecutor
from dev.simulation.outcome import Outcome, summarize
from dev.simulation.policies import POLICIES
from dev.simulation.quick_core import QuickCore
from dev.simulation.replica import SimulatedReplica, Timing
from dev.simulation.timeline import Timeline
from dev.simulation.workload import VOCAB_SIZE, Workload

_USUAL = Timing()


@dataclass(frozen=True, slots=True)
class Scenario:
    """`core` selects the replicas' engines: the real `engine`, or the `quick` model of it. Each replica is lost every
    `mean_life` seconds on average (None: never); a share `hang_share` of the losses are hangs, the others crashes. The
    service admits `crowd` times as many requests as can run at once. The first `warm_up` share of all requests is not
    counted, because the caches are empty then.
    """

    workload: Workload
    num_replicas: int
    cost: SimulatedStepCost
    core: Literal["engine", "quick"] = "quick"
    policy: str = "prefix"
    num_blocks: int = 4_096
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    timing: Timing = _USUAL
    mean_life: float | None = None
    hang_share: float = 0.25
    crowd: float = 4.0
    warm_up: float = 0.1

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidRequest(f"no policy is called {self.policy!r}; there are {', '.join(POLICIES)}", "policy")
        if self.num_replicas < 1:
            raise InvalidRequest(f"num_replicas is {self.num_replicas}; must be at least 1", "num_replicas")

    @property
    def info(self) -> ExecutorInfo:
        """The description of a replica's executor."""
        return ExecutorInfo(
            model="simulated",
            vocab_size=VOCAB_SIZE,
            max_model_len=self.workload.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
        )


class Simulation:
    """A running scenario. `make_executor` makes the device of each real engine."""

    def __init__(self, scenario: Scenario, make_executor: MakeExecutor = CountingExecutor) -> None:
        self.scenario = scenario
        self.timeline = Timeline()
        self.replicas: list[SimulatedReplica] = []
        self._make_executor = make_executor
        self._random = Random(f"{scenario.workload.seed} losses")
        self.router = ReplicaSet(
            [str(number) for number in range(scenario.num_replicas)],
            make_router=POLICIES[scenario.policy],
            make_link=self._make_replica,
            clock=self.timeline,
        )
        crowd = max(round(scenario.crowd * scenario.num_replicas * scenario.max_num_seqs), 1)
        admission = Admission(crowd, crowd * scenario.workload.max_model_len, self.timeline, is_shared=True)
        self.clients = Clients(
            self.timeline, scenario.workload, self.router, admission, tells_all=scenario.core == "engine"
        )

    def _make_replica(
        self,
        number: int,
        path: str,
        owner: LinkOwner,
        on_loss: Callable[[int, str], None],
        on_proven: Callable[[int], None],
        /,
    ) -> SimulatedReplica:
        replica = SimulatedReplica(
            number,
            owner,
            self.timeline,
            self.scenario.timing,
            self._make_core,
            on_news=lambda events: self.clients.look(events),
            on_loss=lambda number: self.clients.look_everywhere(),
        )
        self.replicas.append(replica)
        return replica

    def _make_core(self) -> Core:
        scenario = self.scenario
        if scenario.core == "quick":
            return QuickCore(scenario.info, scenario.cost, lambda request_id: self.clients.turn_of(request_id))
        return EngineCore(scenario.info, scenario.cost, make_executor=self._make_executor)

    def run(self) -> Outcome:
        """Run until every request has ended. Raises `InternalError` if a token was lost or wrong."""
        began, cpu_began = time.perf_counter(), time.process_time()
        self.router.start(self.scenario.num_replicas, 0)
        self.clients.start()
        self._plan_loss()
        self.timeline.run()
        if not self.clients.is_done:
            raise InternalError(f"nothing is left to happen at {self.timeline.now:.3f} s, but requests wait")
        self.router.close()
        return summarize(
            self.clients.records,
            [replica.work for replica in self.replicas],
            num_requests=self.scenario.workload.num_requests,
            warm_up=self.scenario.warm_up,
            virtual_seconds=self.timeline.now,
            wall_seconds=time.perf_counter() - began,
            cpu_seconds=time.process_time() - cpu_began,
            num_losses=self.router.num_losses,
        )

    def _plan_loss(self) -> None:
        if self.scenario.mean_life is not None:
            pause = self._random.expovariate(len(self.replicas) / self.scenario.mean_life)
            self.timeline.after(pause, self._lose_one)

    def _lose_one(self) -> None:
        self._random.choice(self.replicas).lose(self._random.random() < self.scenario.hang_share)
        self._plan_loss()


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario to its end."""
    return Simulation(scenario).run()
