"""The main function of a shard's process: warms up, listens, then serves until a signal arrives or the device is
lost."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from bridle.distributed.address import Tls
from bridle.distributed.shard import Shard, start_shard
from bridle.engine.interfaces import Executor
from bridle.engine.warm_up import warm_up
from bridle.errors import ShardUnavailable
from bridle.threads import run_in_thread

_log = logging.getLogger(__name__)

#: Exit status of a shard whose device is lost; the process that started the shard should start it again.
DEVICE_LOST = 75  # EX_TEMPFAIL
_GRACE_SECONDS = 1.0


def run_shard(
    executor: Executor,
    address: str,
    *,
    tls: Tls | None = None,
    warm: bool = True,
    on_listening: Callable[[str], None] = lambda address: None,
) -> int:
    """Serve `executor` until SIGTERM or SIGINT. Returns the exit status.

    A second signal ends the process at once, because a step may hang. This function must be called from the main
    thread. `on_listening` is called with the address once routers can connect. If `warm` is true, the largest possible
    step is run before.
    """
    ended = threading.Event()
    losses: list[ShardUnavailable] = []

    def lose(error: ShardUnavailable) -> None:
        """Stop serving: the router has been notified, and only a new process can use the device again."""
        _log.error("the device can no longer compute, and this shard stops: %s", error)
        losses.append(error)
        ended.set()

    def leave(number: int, _frame: FrameType | None) -> None:
        if ended.is_set():
            os._exit(128 + number)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        if warm:
            found = run_in_thread(lambda: warm_up(executor))
            times = found.num_tokens, 1e3 * found.seconds, found.num_seqs, 1e3 * found.decode_seconds
            _log.info(
                "warm-up done: %d prompt tokens took %.0f ms, one token for each of %d sequences took %.0f ms", *times
            )
        server, bound = start_shard(Shard(executor, on_device_lost=lose), address, tls)
        on_listening(bound)
        ended.wait()
        server.stop(_GRACE_SECONDS).wait()
    finally:
        executor.close()
    return DEVICE_LOST if losses else 0
