"""A thread that receives the replies to steps and decodes them into answers while the engine's thread computes.

So decoding is done when the forward pass ends. The engine's thread begins an exchange, calls `expect`, and takes the
result when it needs it.
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue

from bridle.aici.client.dialect2 import StepExchange
from bridle.engine.interfaces import Answer
from bridle.errors import ProtocolError

_log = logging.getLogger(__name__)
#: How often the thread checks whether it should end, in seconds.
_LOOK = 0.25


class ReplyReader:
    """Receives for one exchange. `is_open` from `expect` until `receive` has given the answers."""

    def __init__(self, exchange: StepExchange) -> None:
        self._exchange = exchange
        self._wanted: SimpleQueue[None] = SimpleQueue()
        self._results: SimpleQueue[dict[int, Answer] | ProtocolError] = SimpleQueue()
        self._closed = False
        self.is_open = False
        self._thread = threading.Thread(target=self._run, name="bridle-aici-listen", daemon=True)
        self._thread.start()

    def expect(self) -> None:
        """Begin to listen: a request was sent, and a reply will come."""
        self.is_open = True
        self._wanted.put(None)

    def receive(self, timeout: float) -> dict[int, Answer] | None:
        """Wait for the answers; None if they are not there within `timeout` seconds. Raises `ProtocolError`."""
        try:
            result = self._results.get(timeout > 0, timeout if timeout > 0 else None)
        except Empty:
            return None
        self.is_open = False
        if isinstance(result, ProtocolError):
            raise result
        return result

    def close(self) -> None:
        """Wait until the thread no longer listens. Called when the runtime has ended."""
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
            except Exception as error:  # a bug; whoever waits must hear of it, as nobody listens any more
                _log.exception("a reply of the control runtime could not be read")
                self._results.put(ProtocolError(f"its reply could not be read: {error!r}"))
                return
            if result is None:
                return
            self._results.put(result)

    def _receive(self) -> dict[int, Answer] | None:
        """Receive the answers; None if there is nothing to wait for any more."""
        while not self._closed:
            answers = self._exchange.receive(_LOOK)
            if answers is not None:
                return answers
        return None
