"""A thread that receives the replies to steps and decodes them while the engine's thread computes.

So a reply is usually decoded before the forward pass ends. The engine's thread begins an exchange, calls `expect`, and
takes the result when it needs it.
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue

from bridle.aici.client.dialect2 import StepExchange
from bridle.engine.interfaces import Answer
from bridle.errors import ProtocolError

_log = logging.getLogger(__name__)
#: Seconds between two checks whether the thread should end.
_LOOK = 0.25


class ReplyReader:
    """Thread that receives the replies of one exchange at a time. `is_open` is true from `expect` until `receive` has
    returned the answers."""

    def __init__(self, exchange: StepExchange) -> None:
        self._exchange = exchange
        self._wanted: SimpleQueue[None] = SimpleQueue()
        self._results: SimpleQueue[dict[int, Answer] | ProtocolError] = SimpleQueue()
        self._closed = False
        self.is_open = False
        self._thread = threading.Thread(target=self._run, name="bridle-aici-listen", daemon=True)
        self._thread.start()

    def expect(self) -> None:
        """Start to wait for the reply to a request that was just sent."""
        self.is_open = True
        self._wanted.put(None)

    def receive(self, timeout: float) -> dict[int, Answer] | None:
        """Wait for the answers; None if they did not arrive within `timeout` seconds. Raises `ProtocolError`."""
        try:
            result = self._results.get(timeout > 0, timeout if timeout > 0 else None)
        except Empty:
            return None
        self.is_open = False
        if isinstance(result, ProtocolError):
            raise result
        return result

    def close(self) -> None:
        """Wait until the thread has ended. Called when the runtime has ended."""
        self._closed = True
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.get()
            try:
                result = self._receive()
            except ProtocolError as error:
                self._results.put(error)
                return
            # a bug; the waiting thread must get the error, because no reply will be read any more
            except Exception as error:
                _log.exception("a reply of the control runtime could not be read")
                self._results.put(ProtocolError(f"its reply could not be read: {error!r}"))
                return
            if result is None:
                return
            self._results.put(result)

    def _receive(self) -> dict[int, Answer] | None:
        """Receive the answers; None if the reader was closed or the exchange has ended."""
        while not self._closed:
            answers = self._exchange.receive(_LOOK)
            if answers is not None:
                return answers
        return None
