"""Limits how much of an event loop's time cheap messages get when clients send too many. The time is divided among
users.

A single refusal or empty frame costs almost nothing. But very many of these messages would take a whole processor from
other users. So refusals and empty frames get only a share of the event loop's time. As long as the share is not used
up, no message waits. When the share is used up, users take turns, no matter how many connections they have. The
connections of one user also take turns. In one turn, one message is handled, or a few if they are short; then the loop
does other work. A connection that waits for its turn is not read, so its unread data stays with the client.

`LoopThrottle` limits the time for cheap messages. `RateBudget` limits the number of cheap messages on one connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from bridle.errors import InvalidRequest, ProtocolError

#: Seconds of cheap messages that may be spent at once before users have to wait.
BURST = 0.005
SHARE = 0.25
#: Maximum debt in seconds. Refusals on new connections are charged before anyone waits. Without a limit, a flood of
#: them would make all users wait, after its end, for as long as it lasted.
MAX_DEBT = 0.1
_MIN_PAUSE = 0.001  # seconds; timers have no finer resolution
#: Seconds that turns may take between other work of the loop, estimated from the last charges, and maximum number of
#: turns.
SLICE, MAX_AT_ONCE = 0.001, 8
_NEWS = 0.1  # weight of one charge in the mean cost of a turn


#: Number of useless messages that a connection may send at once, and number per second after that. A client with a bug
#: sends far fewer; a flood is far more.
MAX_USELESS = 1_000
USELESS_RATE = 10.0


class RateBudget:
    """Counts the useless messages of one connection. `clock` measures time."""

    def __init__(
        self, most: int = MAX_USELESS, rate: float = USELESS_RATE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._rate = rate
        self._clock = clock
        self._left = float(most)
        self._filled_at = clock()

    def charge(self, what: str, number: int = 1) -> None:
        """Count `number` more useless messages of this connection. If the connection sends too many useless messages,
        raise `ProtocolError`; the connection is then closed. `what` names the messages in the error."""
        now = self._clock()
        self._left = min(self._left + self._rate * (now - self._filled_at), self._most) - number
        self._filled_at = now
        if self._left < 0:
            raise ProtocolError(f"too many {what}: at most {self._most} at once, and then {self._rate:g} per second")


class LoopThrottle:
    """A share of one event loop's time for cheap messages. `clock` measures time; `charge` records the time that was
    spent."""

    def __init__(self, share: float = SHARE, burst: float = BURST, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < share <= 1:
            raise InvalidRequest(f"share is {share}; must be more than 0 and at most 1", "share")
        self._share = share
        self._burst = self._left = burst
        self._clock = clock
        self._filled_at = clock()
        self._waiting: OrderedDict[str, OrderedDict[Callable[[], object], None]] = OrderedDict()
        self._timer: asyncio.Handle | None = None
        self._is_giving = False  # a turn is in progress
        self._usual = SLICE  # mean cost of a turn, in seconds

    @property
    def num_waiting(self) -> int:
        """Return the number of tasks that wait for a turn."""
        return sum(map(len, self._waiting.values()))

    def charge(self, seconds: float) -> None:
        """Record that `seconds` of the share were spent. For frames, elapsed time is charged, because a loop that gets
        no processor time has none to share. For refusals, processor time is charged, so that they stay fast on a busy
        server."""
        self._left = max(self._left - seconds, -MAX_DEBT)
        self._usual += _NEWS * (seconds - self._usual)

    def schedule(self, user: str, go_on: Callable[[], object]) -> None:
        """Call `go_on` when it is this user's turn. The turn comes at once if the share has time left and no message
        waits. A call during a turn waits until the loop has done its other work. Otherwise turns could follow each
        other without end, and the loop would do no other work. Repeated calls before the turn have no effect."""
        if not self._waiting and not self._is_giving and self._has_time():
            self._run_now(go_on)
            return
        self._waiting.setdefault(user, OrderedDict())[go_on] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_soon(self._next)

    def leave(self, user: str, go_on: Callable[[], object]) -> None:
        """Cancel a scheduled turn, because the connection is closed. Idempotent; has no effect after the turn."""
        waiting = self._waiting.get(user)
        if waiting is not None:
            waiting.pop(go_on, None)
            if not waiting:
                del self._waiting[user]

    async def wait(self, user: str) -> None:
        """Wait until it is this user's turn."""
        if not self._waiting and self._has_time():
            return
        turn = asyncio.Event()
        self.schedule(user, turn.set)
        try:
            await turn.wait()
        finally:
            self.leave(user, turn.set)

    def _has_time(self) -> bool:
        now = self._clock()
        self._left = min(self._left + self._share * (now - self._filled_at), self._burst)
        self._filled_at = now
        return self._left > 0

    def _next(self, is_due: bool = False) -> None:
        """Run the next turn, or several turns if they are cheap. Further turns run after the loop has done its other
        work. A turn that `is_due` runs even if more time was charged meanwhile. So a flood of new connections cannot
        delay a turn forever."""
        self._timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        if not self._has_time() and not is_due:
            self._timer = loop.call_later(max(-self._left / self._share, _MIN_PAUSE), self._next, True)
            return
        self._timer = loop.call_soon(self._next)
        for _ in range(min(max(int(SLICE / max(self._usual, 1e-9)), 1), MAX_AT_ONCE)):
            self._give_turn()
            if not self._waiting or not self._has_time():
                return

    def _give_turn(self) -> None:
        user, waiting = self._waiting.popitem(last=False)
        go_on, _ = waiting.popitem(last=False)
        if waiting:
            self._waiting[user] = waiting
        self._run_now(go_on)

    def _run_now(self, go_on: Callable[[], object]) -> None:
        self._is_giving = True
        try:
            go_on()
        finally:
            self._is_giving = False
