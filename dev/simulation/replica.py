"""A simulated replica for a router, in virtual time: messages take some time in each direction, and the replica fails
sometimes.

The class simulates `ReplicaLink` and the replica's process behind it. A replica that fails loses its requests. The
router notices a crash a moment later, and a hang after a timeout. The replica works again after its process has been
restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bridle.config import EngineConfig
from bridle.distributed.replica_link import LinkOwner
from bridle.distributed.replica_messages import PROTOCOL, CancelRequest, Events, Handshake, Submit, ToReplica, WireEvent
from dev.simulation.core import Core, CoreWork
from dev.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations in seconds: of a message, until the router notices a crash, until it notices a hang, and until a lost
    replica is ready again."""

    way: float = 0.000_5
    crash_noticed: float = 0.01
    hang_noticed: float = 1.0
    restart: float = 30.0


class SimulatedReplica:
    """A `ReplicaConnection`, and the simulated replica behind it. `make_core` begins a life of the process.
    `on_news(number, events)` is called after the router received events, `on_loss(number)` after it learned of a loss.
    """

    def __init__(
        self,
        number: int,
        owner: LinkOwner,
        timeline: Timeline,
        timing: Timing,
        make_core: Callable[[], Core],
        on_news: Callable[[list[WireEvent]], None],
        on_loss: Callable[[int], None],
    ) -> None:
        self.number = number
        self.num_lives = 0
        self.is_up = False
        self._owner = owner
        self._timeline = timeline
        self._timing = timing
        self._make_core = make_core
        self._on_news = on_news
        self._on_loss = on_loss
        self.core = make_core()
        self._inbox: list[Submit | CancelRequest] = []
        self._stretch: int | None = None  # number of the current stretch of work
        self._num_stretches = 0
        self._past = CoreWork()

    # -- for the router --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life of the process, and inform the router."""
        if self.num_lives:
            self.core = self._make_core()
        self.num_lives += 1
        self.is_up = True
        config = EngineConfig()
        hello = Handshake(PROTOCOL, 1 + self.number, self.core.info, config.max_forks, config.max_waiting)
        self._owner.note_up(self.number, hello)

    def send(self, message: ToReplica) -> None:
        assert isinstance(message, Submit | CancelRequest), "simulated replicas have no adapters"
        self._timeline.after(self._timing.way, self._receive, self.num_lives, message)

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    # -- for the simulation ----------------------------------------------------------------------------------

    @property
    def work(self) -> CoreWork:
        """The work done in all lives of the process."""
        return _sum(self._past, self.core.work) if self.is_up else self._past

    def lose(self, is_hung: bool) -> None:
        """Crash or hang the process now; it is started again later."""
        if not self.is_up:
            return
        self._tell(self.core.leave(self._timeline.now))
        self._past = _sum(self._past, self.core.work)
        self.is_up, self._stretch = False, None
        self._inbox.clear()
        noticed = self._timing.hang_noticed if is_hung else self._timing.crash_noticed
        self._timeline.after(noticed, self._note_lost, "no sign of life" if is_hung else "the connection ended")
        self._timeline.after(noticed + self._timing.restart, self.start)

    # -- inside ----------------------------------------------------------------------------------------------

    def _note_lost(self, reason: str) -> None:
        self._owner.on_disconnect(self.number, reason)
        self._on_loss(self.number)

    def _receive(self, life: int, message: Submit | CancelRequest) -> None:
        if not self.is_up or life != self.num_lives:
            return  # the message arrived at a socket that is no longer read
        self._inbox.append(message)
        if self._stretch is None:
            self._work()
        elif (end := self.core.shorten(self._timeline.now)) is not None:
            self._plan_end(end)

    def _work(self) -> None:
        """Begin the next stretch of work, with the messages that have arrived."""
        if self._inbox:
            self.core.take(self._inbox)
            self._inbox = []
        self._stretch = None
        if (end := self.core.begin(self._timeline.now)) is not None:
            self._plan_end(end)

    def _plan_end(self, end: float) -> None:
        self._num_stretches += 1
        self._stretch = self._num_stretches
        self._timeline.at(end, self._finish, self._stretch)

    def _finish(self, stretch: int) -> None:
        if stretch != self._stretch:
            return  # the stretch was shortened, or the replica is lost
        self._tell(self.core.finish())
        self._work()

    def _tell(self, events: list[WireEvent]) -> None:
        if events:
            self._timeline.after(self._timing.way, self._deliver, events)

    def _deliver(self, events: list[WireEvent]) -> None:
        self._owner.note_events(self.number, Events(events))
        self._on_news(events)


def _sum(one: CoreWork, other: CoreWork) -> CoreWork:
    return CoreWork(*(getattr(one, name) + getattr(other, name) for name in CoreWork.__slots__))
