"""Keeps a control runtime running: starts it, notices its end at once, and restarts it.

A `RuntimeInstance` is one process with its channels. No thread may wait in a channel that is being closed. So the
thread that uses an instance's main channel closes the instance. The supervisor closes an instance that ends before it
is taken. Methods that do not use the main channel are thread-safe. This module does not depend on sequences.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bridle.aici.client.dialect1 import Dialect1
from bridle.aici.client.dialect2 import Dialect2, StepExchange
from bridle.aici.client.process import RuntimeConfig, RuntimeProcess
from bridle.aici.client.reply_reader import ReplyReader
from bridle.aici.client.side_channel import SideChannel
from bridle.errors import BridleError, ControllerUnavailable

_log = logging.getLogger(__name__)

#: Pauses between attempts to start a runtime again, in seconds; the last one repeats.
BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
#: A runtime that ran for this many seconds counts as started successfully.
_LIVED_WELL = 10.0


@dataclass(slots=True, eq=False)
class RuntimeInstance:
    """One process of the runtime. `error` is the reason why the process ended. `is_taken` is set once a thread uses the
    process's main channel."""

    process: RuntimeProcess
    side: SideChannel
    exchange: StepExchange
    listener: ReplyReader
    error: str = ""
    is_taken: bool = False
    born: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Close the channels. Called by the main channel's thread, once the runtime has ended."""
        self.side.close()
        self.listener.close()
        self.process.close()


class RuntimeSupervisor:
    """Owns the runtime process. The first start happens in the constructor, which raises its error. `on_restart` is
    called, from another thread, when a lost runtime has been replaced."""

    def __init__(self, config: RuntimeConfig, vocab_size: int, on_restart: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self.num_restarts = 0
        self._on_restart = on_restart
        self._vocab_size = vocab_size
        self.changed = threading.Condition()
        self._closed = False
        self._starter: threading.Thread | None = None
        self._early_deaths = 0
        self.current: RuntimeInstance | None = None
        self._start()

    def _start(self) -> None:
        process = RuntimeProcess(self.config)
        try:
            life = self._make_life(process)
            with self.changed:
                if not (self._closed or life.error):
                    self.current = life
                    self.changed.notify_all()
                    _log.info(
                        "control runtime started: pid %d, vocabulary of %d tokens", process.pid, process.vocab_size
                    )
                    return
                error = "" if self._closed else life.error
        except BaseException:
            process.kill()
            process.close()
            raise
        process.kill()
        life.close()
        if error:
            raise ControllerUnavailable(f"the control runtime ended while it started: {error}")

    def _make_life(self, process: RuntimeProcess) -> RuntimeInstance:
        side = SideChannel(process, lambda reason: self.lose(life, reason))
        exchange = make_exchange(process, self._vocab_size)
        life = RuntimeInstance(process, side, exchange, ReplyReader(exchange))
        side.start()
        return life

    def take(self) -> RuntimeInstance | None:
        """Return the current runtime, if there is one. The caller uses its main channel, and closes the runtime."""
        with self.changed:
            if self.current is not None:
                self.current.is_taken = True
            return self.current

    def wait(self, timeout: float) -> RuntimeInstance:
        """Wait until a runtime is running, and return it. Raises `ControllerUnavailable` after `timeout` seconds."""
        with self.changed:
            self.changed.wait_for(lambda: self.current is not None or self._closed, timeout)
            if self.current is None:
                raise ControllerUnavailable("the control runtime is not running; it is being restarted")
            return self.current

    def lose(self, life: RuntimeInstance, error: str) -> None:
        """Kill a runtime that failed, and start the next one. Safe from any thread. Idempotent."""
        with self.changed:
            life.error = life.error or error  # an instance that is not current yet will not become current
            if self.current is not life:
                return
            self.current = None
            if self._closed:
                return
            self.num_restarts += 1
            well = time.monotonic() - life.born > _LIVED_WELL
            self._early_deaths = 0 if well else self._early_deaths + 1
            self._starter = threading.Thread(target=self._restart, args=(life,), name="bridle-aici-keeper", daemon=True)
            self._starter.start()
        _log.error("the control runtime ended unexpectedly: %s", error)

    def _restart(self, lost: RuntimeInstance) -> None:
        lost.process.kill()
        if not lost.is_taken:
            lost.close()
        attempt = max(self._early_deaths - 1, 0)
        while not self._rest(BACK_OFF[min(attempt, len(BACK_OFF) - 1)]):
            attempt += 1
            try:
                self._start()
            except (BridleError, OSError) as error:
                _log.error("the control runtime cannot be restarted: %s", error)
            except Exception:  # a bug; if this thread ended, no runtime would start again
                _log.exception("the control runtime cannot be restarted")
            else:
                self._on_restart()
                return

    def _rest(self, seconds: float) -> bool:
        """Sleep. Returns True if the supervisor was closed during the sleep."""
        with self.changed:
            return self.changed.wait_for(lambda: self._closed, seconds)

    def close(self) -> None:
        """End the runtime permanently. Called by the main channel's thread. Idempotent."""
        with self.changed:
            self._closed = True
            life, self.current = self.current, None
            starter = self._starter
            self.changed.notify_all()
        if life is not None:
            life.error = "it was shut down"
            life.process.kill()
            life.close()
        if starter is not None:
            starter.join()


def make_exchange(process: RuntimeProcess, vocab_size: int) -> StepExchange:
    """Return the object that exchanges messages in the runtime's dialect."""
    if process.config.dialect == 1:
        return Dialect1(process, vocab_size)
    return Dialect2(process, vocab_size)
