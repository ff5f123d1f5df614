"""A controller runtime for tests, whose programs are plain functions and whose delays use a fake clock.

`FakeControllerPool` implements `ControllerPool`. It also checks the rules that the engine must follow. Each sequence
has at most one open ask, and none after its end. A fork is asked together with its parent. The tokens that a controller
sees add up. Breaches are collected in `violations`. The pool uses no sandboxes and no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, Ask, ControllerPool, StoredValue
from bridle.engine.request import Request
from bridle.errors import ControllerError
from bridle.testing.clock import FakeClock

#: One step of a fork path: (how many times the parent had been asked, branch number).
Turn = tuple[int, int]


@dataclass(frozen=True, slots=True)
class View:
    """The state that a program sees: all `tokens`, the `path` that identifies a fork, and `num_asks`, which counts from
    0."""

    tokens: tuple[int, ...]
    num_prompt: int
    sampled: int | None = None
    path: tuple[Turn, ...] = ()
    num_asks: int = 0
    candidates: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that arrives after `delay` seconds of the pool's clock. It never arrives if `delay` is None."""

    decision: Decision | None = None
    error: ControllerError | None = None
    delay: float | None = 0.0
    log: str = ""
    stored: tuple[StoredValue, ...] = ()


Program = Callable[[View], "Decision | Reply"]


@dataclass(frozen=True, slots=True)
class FakeController:
    """The controller of a request, which runs `program`. It never opens if `open_delay` is None."""

    program: Program
    prompt: tuple[int, ...] | None = None
    open_delay: float | None = 0.0
    open_error: ControllerError | None = None


@dataclass(slots=True)
class _Instance:
    """The pool's state of one sequence."""

    controller: FakeController
    view: View
    pending: tuple[float | None, Answer] | None = None  # (moment of arrival, answer)


@dataclass(slots=True)
class _Opening:
    due: float | None
    future: Future[tuple[int, ...]] = field(default_factory=Future)
    result: tuple[int, ...] | ControllerError = ()


class FakeControllerPool(ControllerPool):
    """A pool that runs `FakeController`s and bare programs in the engine's own thread, on a fake clock."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.violations: list[str] = []
        self.asked: list[Ask] = []
        self.is_shut_down = False
        self.final_delay: float | None = 0.0  # how long last words take; None: they never come
        self._instances: dict[int, _Instance] = {}
        self._openings: list[_Opening] = []
        self.abandoned: list[str] = []  # requests whose instances were never asked

    @property
    def live(self) -> frozenset[int]:
        """Return the sequences that were asked and are not closed."""
        return frozenset(self._instances)

    def accepts(self, controller: object) -> bool:
        """Return whether this is a `FakeController` or a function."""
        return isinstance(controller, FakeController) or callable(controller)

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Return a future that is done at once, or at a later call when the clock has passed the controller's
        `open_delay`."""
        controller = _controller_of(request)
        delay = controller.open_delay
        opening = _Opening(None if delay is None else self.clock() + delay)
        opening.result = controller.open_error or controller.prompt or request.prompt
        self._openings.append(opening)
        self.settle()
        return opening.future

    def settle(self) -> None:
        """Complete the openings whose delay is over. `collect` also completes them."""
        for opening in self._openings:
            if opening.due is not None and opening.due <= self.clock():
                _complete(opening)
        self._openings = [one for one in self._openings if not one.future.done()]

    def abandon(self, request: Request) -> None:
        """Record the request's id. An opening has no state to free."""
        self.abandoned.append(request.id)

    def ask(self, asks: Sequence[Ask]) -> None:
        """Run the programs now. Their answers arrive when their delay is over."""
        before = {seq_id: instance.view for seq_id, instance in self._instances.items()}
        for ask in asks:
            self.asked.append(ask)
            self._take(ask, before)

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """Return the answers that are due, after moving the clock to the last requested one, at most to `deadline`."""
        self._wait(list(seq_ids), deadline)
        self.settle()
        now, arrived = self.clock(), {}
        for seq_id, instance in self._instances.items():
            if instance.pending is None:
                continue
            due, answer = instance.pending
            if due is not None and due <= now:
                arrived[seq_id] = answer
                instance.pending = None
        return arrived

    def close(self, seq_ids: Sequence[int]) -> None:
        """Forget the given sequences."""
        for seq_id in seq_ids:
            self._instances.pop(seq_id, None)

    def shutdown(self) -> None:
        """Forget all sequences, and cancel pending openings."""
        self.is_shut_down = True
        self._instances.clear()
        for opening in self._openings:
            opening.future.cancel()

    # -- one ask -------------------------------------------------------------------------------------------

    def _take(self, ask: Ask, before: Mapping[int, View]) -> None:
        instance = self._instance(ask, before)
        if instance is None:
            return
        if instance.pending is not None and not ask.final:
            self._breach(ask, "was asked again before its answer was fetched")
        if ask.backtrack > len(instance.view.tokens):
            self._breach(ask, f"takes {ask.backtrack} of {len(instance.view.tokens)} tokens back")
        instance.view = replace(after(instance.view, ask.tokens, ask.backtrack, ask.sampled), candidates=ask.candidates)
        if ask.final:
            reply = Reply(delay=self.final_delay)
        else:
            reply = _reply(instance.controller.program, instance.view)
        answer = Answer(reply.decision, reply.error, reply.log, reply.stored)
        instance.pending = (None if reply.delay is None else self.clock() + reply.delay, answer)

    def _instance(self, ask: Ask, before: Mapping[int, View]) -> _Instance | None:
        if ask.request is not None:
            controller = _controller_of(ask.request)
            prompt = controller.prompt or ask.request.prompt
            if ask.seq_id in self._instances:
                self._breach(ask, "was introduced twice")
            self._instances[ask.seq_id] = _Instance(controller, View(prompt, len(prompt), num_asks=-1))
        elif ask.parent is not None:
            self._fork(ask, ask.parent, before)
        elif ask.seq_id not in self._instances:
            self._breach(ask, "is unknown")
        return self._instances.get(ask.seq_id)

    def _fork(self, ask: Ask, parent_id: int, before: Mapping[int, View]) -> None:
        if parent_id not in before or ask.seq_id in self._instances:
            self._breach(ask, f"is no fork of {parent_id}, or was there before")
            return
        view = forked(before[parent_id], ask.branch or 0)
        self._instances[ask.seq_id] = _Instance(self._instances[parent_id].controller, view)

    def _breach(self, ask: Ask, what: str) -> None:
        self.violations.append(f"sequence {ask.seq_id} {what}: {ask}")

    # -- time ----------------------------------------------------------------------------------------------

    def _wait(self, seq_ids: Sequence[int], deadline: float | None) -> None:
        if deadline is None:
            return
        pending = (self._instances[i].pending for i in seq_ids if i in self._instances)
        moments = [deadline if item[0] is None else item[0] for item in pending if item is not None]
        if moments:
            self.clock.wait_until(min(max(moments), deadline))


def after(view: View, tokens: Sequence[int], backtrack: int, sampled: int | None) -> View:
    """Return the view of the next ask: `backtrack` tokens are removed, and `tokens` are added."""
    kept = view.tokens[: len(view.tokens) - backtrack]
    num_prompt = min(view.num_prompt, len(kept))
    return View(kept + tuple(tokens), num_prompt, sampled, view.path, view.num_asks + 1)


def forked(view: View, branch: int) -> View:
    """Return the first view of branch `branch` of a fork."""
    return View(view.tokens, view.num_prompt, None, (*view.path, (view.num_asks, branch)), view.num_asks)


def _controller_of(request: Request) -> FakeController:
    controller = request.controller
    if isinstance(controller, FakeController):
        return controller
    assert callable(controller)
    return FakeController(controller)


def _reply(program: Program, view: View) -> Reply:
    """Return the program's reply. An exception in the program becomes an error of the controller."""
    try:
        said = program(view)
    except Exception as error:
        return Reply(error=ControllerError(f"the controller raised {error!r}"))
    return said if isinstance(said, Reply) else Reply(said)


def _complete(opening: _Opening) -> None:
    if opening.future.cancelled():
        return
    if isinstance(opening.result, ControllerError):
        opening.future.set_exception(opening.result)
    else:
        opening.future.set_result(opening.result)
