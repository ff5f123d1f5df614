"""The engine's `ControllerPool` for controllers in a control runtime. Masks are bits in shared memory.

The main channel carries one exchange, a request and its reply, at a time. `ask` sends the request, callbacks run during
the forward pass, and `collect` takes the reply, which a listener thread has decoded. Asks that arrive during an
exchange are sent in the next exchange. When the runtime dies, its sequences fail with an error, and a new runtime is
started in the background. Requests that begin during the restart wait for the new runtime.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from bridle.aici import protocol
from bridle.aici.client.instantiate_messages import InitialOutput
from bridle.aici.client.instantiation import Instances
from bridle.aici.client.process import RuntimeConfig
from bridle.aici.client.reference import WasmController
from bridle.aici.client.supervisor import RuntimeInstance, RuntimeSupervisor
from bridle.aici.client.tool_variables import ToolVariables
from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, Ask, Capability, ControllerPool
from bridle.engine.request import Request
from bridle.errors import ControllerError, ProtocolError

T = TypeVar("T")
_log = logging.getLogger(__name__)

#: First sequence number for instances whose requests ended before the engine made a sequence. The engine's own numbers
#: are all smaller.
_STRAYS = 1 << 60
_GLANCE = 0.001  # seconds between two checks for instances in creation


@dataclass(slots=True)
class _Queue:
    """The changes to report to controllers in the next exchange, and the sequences to free in that exchange."""

    asks: list[Ask] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)


class RuntimePool(ControllerPool):
    """Pool of controllers in a runtime process. One pool keeps a runtime process alive until `shutdown`.

    `wake` is called from another thread when an instance is ready, so that an idle engine takes a step. Raises
    `ControllerError` if the runtime does not start.
    """

    capabilities = frozenset[Capability](("lookahead", "remote_lookahead"))

    def __init__(self, config: RuntimeConfig, vocab_size: int, wake: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self.wake = wake
        self.is_store = False  # True if no engine uses the pool, only uploads and tags
        self._tending = threading.Lock()
        self._queue = _Queue()
        self._answers: dict[int, Answer] = {}
        self._live: set[int] = set()  # sequences that were asked and not closed
        self._leaving: set[int] = set()  # sequences that are freed along with their last ask
        self._asked_at = 0.0
        self._patience = 0.0  # usual time that the engine computes after asking, in seconds
        self._first_words = InitialOutput()
        self.tools = ToolVariables()
        self.held: dict[int, Ask] = {}  # asks without news to guests that wait for tools
        self._foreseen: dict[int, tuple[tuple[int, Answer], ...]] = {}  # answers of clones to draft tokens
        self._stray_ids = count(_STRAYS)
        self.keeper = RuntimeSupervisor(config, vocab_size, lambda: self.wake())
        self.instances = Instances(config, self.keeper, self._first_words, lambda: self.wake())
        self.life: RuntimeInstance | None = self.keeper.take()  # the runtime of the sequences in `_live`

    # -- the runtime process -----------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Return whether a runtime is up."""
        return self.keeper.current is not None

    @property
    def num_restarts(self) -> int:
        """Return how many times the runtime was lost."""
        return self.keeper.num_restarts

    @property
    def runtime_pid(self) -> int | None:
        """Return the id of the runtime's process, which leads a group of all its child processes; None while no runtime
        runs."""
        life = self.keeper.current
        return life.process.pid if life is not None else None

    def knows(self, extension: str) -> bool:
        """Return whether the runtime supports a protocol extension. Waits for a runtime, so do not call this on the
        engine's thread."""
        return extension in self.keeper.wait(self.config.start_timeout).process.extensions

    def call(self, request: protocol.Message, data_type: type[T]) -> T:
        """Send a request, such as an upload, on the side channel and wait for its reply. Waits for a runtime if none
        runs. Do not call this on the engine's thread. Raises `InvalidRequest` or `ControllerError`."""
        if self.is_store:
            with self._tending:
                self._sync()  # frees sequences of an earlier runtime; an engine does this whenever it asks
        return self.keeper.wait(self.config.start_timeout).side.call(request, data_type).result()

    def _sync(self) -> RuntimeInstance | None:
        """Return the current runtime. Sequences of an earlier runtime fail."""
        current, mine = self.keeper.current, self.life
        if current is not mine:
            current = self.keeper.take()
            if mine is not None:
                self._fail_all(mine)
                threading.Thread(target=mine.close, name="bridle-aici-bury", daemon=True).start()
            self.life = current
        return current

    def _fail_all(self, life: RuntimeInstance) -> None:
        error = f"the control runtime ended: {life.error}"
        for seq_id in self._live | {ask.seq_id for ask in self._queue.asks}:
            self._answers[seq_id] = Answer(error=ControllerError(error))
        self._live.clear()
        self._leaving.clear()
        self.held.clear()
        self._foreseen.clear()
        self._queue = _Queue()

    # -- ControllerPool ----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Return whether work is pending: a due reply, freed instances to report to the runtime, or a lost runtime to
        close."""
        life = self.life
        if self.keeper.current is not life and self.is_ready:
            return True
        return life is not None and (life.listener.is_open or bool(self._queue.freed or self.instances.strays))

    def accepts(self, controller: object) -> bool:
        """Return whether `controller` is a `WasmController` that a user chose. `PolicyPool` accepts Wasm controllers
        that a policy demands."""
        return isinstance(controller, WasmController) and not controller.is_demanded

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        return self.instances.open(request)

    def modules_of(self, request: Request) -> tuple[tuple[str, str], ...]:
        """Return the requested name and the module of the request's instance."""
        return self.instances.modules_of(request)

    def abandon(self, request: Request) -> None:
        """Drop the instance of a request that will not run. Safe from any thread."""
        self.instances.abandon(request)

    def ask(self, asks: Sequence[Ask]) -> None:
        """Send the asks to the runtime, or queue them while an exchange is open."""
        life = self._sync()
        for ask in asks:
            self._foreseen.pop(ask.seq_id, None)
            if self._is_lost(ask, life):
                self._answers[ask.seq_id] = Answer(error=ControllerError("the control runtime ended a moment ago"))
                self._live.discard(ask.seq_id)
            elif _is_silent(ask):
                self._answers[ask.seq_id] = Answer()
                self._live.discard(ask.seq_id)
                self._queue.freed.append(ask.seq_id)
            elif self.tools.holds(ask):
                self.held[ask.seq_id] = ask
            else:
                self.held.pop(ask.seq_id, None)
                self._first_words.claim(ask)
                self._enqueue(ask, life)
                self._live.add(ask.seq_id)
                if ask.final:
                    self._leaving.add(ask.seq_id)
                    self._queue.freed.append(ask.seq_id)
        self._asked_at = time.monotonic()
        self._flush(life)

    def _enqueue(self, ask: Ask, life: RuntimeInstance | None) -> None:
        """Queue an ask for the next exchange, with the results of tool calls that have ended."""
        if life is not None and "variables" in life.process.extensions:
            values = self.tools.inform(ask)
            if values:
                ask = replace(ask, variables=values)
        self._queue.asks.append(ask)

    def _ask_held(self, life: RuntimeInstance | None) -> None:
        """Ask guests whose tool calls have ended."""
        ready = [seq_id for seq_id in self.held if self.tools.is_ready(seq_id)]
        for seq_id in ready:
            self._enqueue(self.held.pop(seq_id), life)
        if ready:
            self._flush(life)

    def _is_lost(self, ask: Ask, life: RuntimeInstance | None) -> bool:
        """Return whether the controller's instance ended with an earlier runtime process."""
        if ask.request is not None:
            opened = self.instances.opened.pop(ask.request.id, None)
            return opened is None or opened.life is not life
        known = ask.parent if ask.parent is not None else ask.seq_id
        return life is None or known not in self._live

    @property
    def is_told_ahead(self) -> bool:
        """Return whether the runtime supports lookahead, which shows likely tokens to clones of controllers."""
        return self.life is not None and "ahead" in self.life.process.extensions

    def lookahead(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        """Return the decisions of the controller's clones for these draft tokens, up to the first token that no clone
        has seen."""
        known: list[Decision] = []
        for token, (told, answer) in zip(tokens, self._foreseen.get(seq_id, ()), strict=False):
            if token != told or answer.decision is None:
                break
            known.append(answer.decision)
        return known

    def take_lookahead_output(self, seq_id: int, num_tokens: int) -> Answer | None:
        """Return the output of the clone that was shown draft token number `num_tokens`, counted from 1."""
        known = self._foreseen.get(seq_id, ())
        if num_tokens > len(known):
            return None
        answer = known[num_tokens - 1][1]
        words = Answer(log=answer.log, stored=answer.stored)
        answer.log, answer.stored = "", ()
        return words

    def close(self, seq_ids: Sequence[int]) -> None:
        """Free the instances; unknown ids are ignored."""
        life = self._sync()
        self.tools.leave(seq_ids)
        for seq_id in seq_ids:
            self._foreseen.pop(seq_id, None)
            self._answers.pop(seq_id, None)
            self.held.pop(seq_id, None)
            if seq_id in self._live:
                self._live.discard(seq_id)
                if seq_id in self._leaving:
                    self._leaving.discard(seq_id)
                else:
                    self._queue.freed.append(seq_id)
        self._flush(life)

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        life = self._sync()
        wanted = set(seq_ids)
        if self.held:
            self._ask_held(life)
            wanted -= self.held.keys()  # no answer will come for these
        if self.instances.strays:
            self._flush(life)  # freed sequences must be sent even if no ask follows for a long time
        if wanted and self._asked_at:
            self._learn_patience()
        while life is not None and life.listener.is_open:
            timeout = 0.0
            if deadline is not None and not wanted <= self._answers.keys():
                timeout = max(deadline - time.monotonic(), 0.0)
            if not self._receive(life, timeout):
                break
            life = self._sync()
        is_unanswered = not wanted <= self._answers.keys() if wanted else not self._answers
        if is_unanswered and life is not None and not life.process.is_alive():
            self._lose(life, "its process ended")
        answers, self._answers = self._answers, {}
        return answers

    def settle(self, timeout: float = 10.0) -> None:
        """Send all queued messages and receive all replies, including those of instances in creation. After this call,
        another engine with its own sequence numbers may use this pool. Raises `ControllerError` after `timeout`
        seconds."""
        deadline = time.monotonic() + timeout
        while self.instances.pending and time.monotonic() < deadline:
            time.sleep(_GLANCE)
        while (life := self._sync()) is not None and (self.is_busy or self._queue.asks):
            self._flush(life)
            if not self._receive(life, max(deadline - time.monotonic(), 0.0)):
                raise ControllerError(f"the control runtime gave no answer within {timeout:g} s")
        self._answers.clear()

    def shutdown(self) -> None:
        self.keeper.close()
        self.instances.close()
        if self.life is not None:
            self.life.close()

    # -- exchanges ---------------------------------------------------------------------------------------

    def _flush(self, life: RuntimeInstance | None) -> None:
        """Begin an exchange if there is a message to send and the channel is free."""
        if life is None or life.listener.is_open:
            return
        while self.instances.strays:
            self._claim(self.instances.strays.popleft(), life)
        queue = self._queue
        if not (queue.asks or queue.freed):
            return
        self._queue = _Queue()
        try:
            life.exchange.begin(queue.asks, queue.freed, self._patience)
            life.listener.expect()
        except ProtocolError as error:
            self._lose(life, str(error))

    def _claim(self, request: Request, life: RuntimeInstance) -> None:
        opened = self.instances.opened.pop(request.id, None)
        if opened is not None and opened.life is life:
            ask = Ask(next(self._stray_ids), request=request, final=True)
            self._queue.asks.append(ask)
            self._queue.freed.append(ask.seq_id)

    def _receive(self, life: RuntimeInstance, timeout: float) -> bool:
        """Receive one reply, and begin the next exchange. Returns False if no reply came in time."""
        try:
            answers = life.listener.receive(timeout)
        except ProtocolError as error:
            self._lose(life, str(error))
            return True
        if answers is None:
            return False
        self._first_words.add_to(answers)
        for seq_id, answer in answers.items():
            if answer.stored or (answer.decision is not None and not answer.decision.is_draw):
                self.tools.note_answer(seq_id, answer)
            if answer.ahead and seq_id in self._live:
                self._foreseen[seq_id] = answer.ahead
        if answers.keys() <= self._live:
            self._answers.update(answers)
        else:
            self._answers.update({seq_id: answers[seq_id] for seq_id in answers.keys() & self._live})
        for seq_id in [seq_id for seq_id, answer in answers.items() if answer.error is not None]:
            if seq_id in self._live:
                self._live.discard(seq_id)
                self._leaving.discard(seq_id)
                self._queue.freed.append(seq_id)
        self._flush(life)
        return True

    def _lose(self, life: RuntimeInstance, error: str) -> None:
        self.keeper.lose(life, error)
        _log.error("the control runtime ended; %d sequences with a controller end with an error", len(self._live))
        self._sync()

    def _learn_patience(self) -> None:
        """Update the average time, about one forward pass, between a request to the runtime and the engine's need for
        the reply. Controllers may compute for this average time."""
        busy = time.monotonic() - self._asked_at
        self._asked_at = 0.0
        self._patience = busy if not self._patience else 0.8 * self._patience + 0.2 * busy


def _is_silent(ask: Ask) -> bool:
    """Return whether a sequence's last ask reports nothing new, so that its controller is freed without a call."""
    return ask.final and not (ask.tokens or ask.backtrack or ask.request) and ask.parent is None
