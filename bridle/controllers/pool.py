"""The pool that runs plain Python controllers: it calls them on the engine's thread, and answers at once."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bridle.controller_tools import Desk, ToolCallContext, ToolExecutor, ToolSession
from bridle.controller_tools.session import adopt, leave
from bridle.controllers.composite_member import num_same
from bridle.controllers.python import Controller, SequenceView
from bridle.controllers.sync_pool import SyncControllerPool, opened
from bridle.engine.control.decision import DRAW, Awaited, Decision
from bridle.engine.interfaces import DRAWN, Answer, Ask, Capability, ask_after
from bridle.engine.request import Request
from bridle.errors import ControllerError

#: Seconds of processor time for lookahead. A controller that took more than the first is not asked ahead any more;
#: after the second, no further token is looked at, because the engine waits.
SLOW_SECONDS, ENOUGH_SECONDS = 0.01, 0.002


@dataclass(slots=True)
class _Instance:
    """The controller of an output. `ahead` are copies of the controller that were shown draft tokens, which took
    `seconds_ahead` seconds; `awaited` are the events that the controller waits for."""

    controller: Controller
    view: SequenceView
    ahead: list[_Told] = field(default_factory=list)
    seconds_ahead: float = 0.0
    is_slow: bool = False
    awaited: tuple[Awaited, ...] = ()

    @property
    def is_waiting(self) -> bool:
        """Return whether the controller waits and none of its awaited calls is done."""
        return bool(self.awaited) and not any(each.is_done for each in self.awaited)

    def copy(self) -> _Instance:
        return _Instance(copy.deepcopy(self.controller), self.view.copy())


class _Told(NamedTuple):
    """A copy of a controller that was shown a token, and the copy's answer."""

    token: int
    copy: _Instance
    answer: Answer


class PythonControllerPool(SyncControllerPool[_Instance]):
    """A `ControllerPool` for `Controller` objects.

    Each request runs on a copy of the given controller, so one object can be passed to many requests. `desk` runs the
    tools that controllers call; `encode` tokenizes text for controllers.
    """

    capabilities = frozenset[Capability](("lookahead", "draft_masks", "forced_text"))

    def __init__(
        self, vocab_size: int, desk: Desk | None = None, encode: Callable[[str], Iterable[int]] | None = None
    ) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._desk: Desk = desk or ToolExecutor()
        self._encode = encode
        self._held: dict[int, Ask] = {}  # asks without news to controllers that wait

    @property
    def is_empty(self) -> bool:
        """Return whether no request has a controller in this pool, waiting or not."""
        return super().is_empty and not self._held

    def accepts(self, controller: object) -> bool:
        return isinstance(controller, Controller)

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Copy the controller and show the prompt to the copy."""
        try:
            controller = copy.deepcopy(request.controller)
            if not isinstance(controller, Controller):
                raise ControllerError(f"{request.controller!r} is not a Controller")
            rewritten = controller.start(request.prompt)
            prompt = request.prompt if rewritten is None else tuple(rewritten)
        except Exception as error:
            failed: Future[tuple[int, ...]] = Future()
            failed.set_exception(_as_error(error, "start"))
            return failed
        view = SequenceView(list(prompt), len(prompt), self._vocab_size, 0, prompt, _encode=self._encode)
        view._probe_names = request.sampling.probes
        if not controller.is_pure:
            behalf = ToolCallContext(request.tenant, request.client_tools, request.id)
            view._caller = ToolSession(self._desk, request.tools, behalf)
        self._opened[request.id] = _Instance(controller, view)
        return opened(prompt)

    def ask(self, asks: Sequence[Ask]) -> None:
        """Call controllers: forks are made first, before their parents change; then all callbacks run."""
        for ask in asks:
            if ask.request is not None:
                self._live[ask.seq_id] = self._opened.pop(ask.request.id)
            elif ask.parent is not None:
                self._fork(ask, ask.parent, ask.branch or 0)
        for ask in asks:
            instance = self._live.get(ask.seq_id)
            if instance is not None:
                self._ask_one(instance, ask)

    def ask_sampled(self, tokens: Mapping[int, int]) -> None:
        """Call controllers after one more sampled token each. Nearly all calls are of this kind, so it has to be
        fast."""
        live, answers = self._live, self._answers
        for seq_id, token in tokens.items():
            instance = live.get(seq_id)
            if instance is None:
                continue
            if instance.awaited or instance.ahead or instance.seconds_ahead:
                self._ask_one(instance, ask_after(seq_id, token))
                continue
            view = instance.view
            view.tokens.append(token)
            view.new_tokens, view.num_rewound, view.sampled = (token,), 0, token
            view.candidates, view.may_force, view.rewritten_by = None, True, ""
            if view._probe_names:
                view.probes = {}
            answers[seq_id] = _decide(instance)

    def _ask_one(self, instance: _Instance, ask: Ask) -> None:
        if instance.awaited and instance.is_waiting and ask == Ask(ask.seq_id, turns=ask.turns):
            self._held[ask.seq_id] = ask
            return
        if self._held:
            self._held.pop(ask.seq_id, None)
        self._answers[ask.seq_id] = (
            self._go_on(instance, ask) if instance.ahead or instance.seconds_ahead else _call(instance, ask)
        )

    def _go_on(self, instance: _Instance, ask: Ask) -> Answer:
        """Call the controller, or the copy that was shown the first tokens before these were sampled."""
        ahead, instance.ahead, instance.seconds_ahead = instance.ahead, [], 0.0
        if not ask.num_foreseen:
            return _call(instance, ask)
        told = ahead[: ask.num_foreseen]
        last = self._live[ask.seq_id] = told[-1].copy
        last.is_slow = instance.is_slow
        answer = _call(last, replace(ask, tokens=ask.tokens[ask.num_foreseen :], num_foreseen=0))
        log = "".join([*(before.answer.log for before in told), answer.log])
        stored = (*(value for before in told for value in before.answer.stored), *answer.stored)
        return replace(answer, log=log, stored=stored) if log or stored else answer

    def lookahead(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        """Show the tokens to copies of a pure controller, one after the other, until a copy does not just sample or the
        time is used up. Copies that have seen the first tokens are reused."""
        instance = self._live.get(seq_id)
        if instance is None or instance.is_slow or not instance.controller.is_pure:
            return []
        ahead = instance.ahead
        del ahead[num_same([told.token for told in ahead], tokens) :]
        began, before = time.thread_time(), instance.seconds_ahead
        for token in tokens[len(ahead) :]:
            if instance.seconds_ahead > ENOUGH_SECONDS:
                break
            told = _tell_copy(ahead[-1].copy if ahead else instance, seq_id, token)
            instance.seconds_ahead = before + time.thread_time() - began
            instance.is_slow = instance.seconds_ahead > SLOW_SECONDS
            if told is None:
                break
            ahead.append(told)
        return [told.answer.decision for told in ahead if told.answer.decision is not None]

    def draft_decision(self, seq_id: int, tokens: Sequence[int]) -> Decision | None:
        """Return the decision of a copy that was shown all draft tokens, or None. Without draft tokens, it is the
        controller's own decision."""
        known = self.lookahead(seq_id, tokens)
        return known[-1] if known and len(known) == len(tokens) else None

    def forced_after(self, seq_id: int, tokens: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        """Call the controller's own `forced_after(token, limit)`. Without this method, no tokens are known to be
        forced."""
        instance = self._live.get(seq_id)
        told = None if instance is None else getattr(instance.controller, "forced_after", None)
        try:
            return [() if told is None else tuple(told(token, limit)) for token in tokens]
        except Exception:  # the controller will raise the error itself when it is asked
            return [() for _ in tokens]

    def take_lookahead_output(self, seq_id: int, num_tokens: int) -> Answer | None:
        """Return the logs and variables that a copy made when it was shown the last of these tokens."""
        instance = self._live.get(seq_id)
        if instance is None or num_tokens > len(instance.ahead):
            return None
        told = instance.ahead[num_tokens - 1]
        instance.ahead[num_tokens - 1] = told._replace(answer=Answer(told.answer.decision))
        return told.answer

    def _fork(self, ask: Ask, parent_id: int, branch: int) -> None:
        parent = self._live[parent_id]
        try:
            controller = parent.controller.fork(branch)
        except Exception as error:
            self._answers[ask.seq_id] = Answer(error=_as_error(error, "fork"))
            return
        seen = parent.view
        view = SequenceView(seen.tokens.copy(), seen.num_prompt, seen.vocab_size, ask.index, _encode=self._encode)
        view._caller, view._calls = seen._caller, adopt(seen._calls)
        view._probe_names = seen._probe_names
        self._live[ask.seq_id] = _Instance(controller, view)

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """Return all answers, which are ready as soon as `ask` returns, and answers of controllers whose wait has
        ended."""
        for seq_id in [seq_id for seq_id in self._held if not self._live[seq_id].is_waiting]:
            self._answers[seq_id] = self._go_on(self._live[seq_id], self._held.pop(seq_id))
        return super().collect(seq_ids, deadline)

    def close(self, seq_ids: Sequence[int]) -> None:
        """Drop the controllers of these sequences, and cancel their tool calls."""
        for seq_id in seq_ids:
            instance = self._live.get(seq_id)
            if instance is not None:
                leave(instance.view._calls)
            self._held.pop(seq_id, None)
        super().close(seq_ids)

    def shutdown(self) -> None:
        self.close(list(self._live))
        super().shutdown()


def _tell_copy(instance: _Instance, seq_id: int, token: int) -> _Told | None:
    """Show a token to a copy of the controller. Returns None unless the copy then samples."""
    try:
        copied = instance.copy()
    except Exception:  # copying fails now; the controller itself is called when the token is sampled
        return None
    answer = _call(copied, Ask(seq_id, (token,), sampled=token))
    is_draw = answer.decision is not None and answer.decision.is_draw
    return _Told(token, copied, answer) if is_draw else None


def _call(instance: _Instance, ask: Ask) -> Answer:
    _update(instance.view, ask)
    return _decide(instance, ask.final)


def _decide(instance: _Instance, is_final: bool = False) -> Answer:
    """Call the controller; its view already has the new tokens."""
    view = instance.view
    try:
        if is_final:
            instance.controller.finish(view)
            decision = None
        else:
            decision = instance.controller.next(view)
            if not isinstance(decision, Decision):
                raise ControllerError(f"next() returned {decision!r}; it must return a Decision")
            instance.awaited = decision.awaited
        if not (view._logs or view._stored):  # true in most steps
            return DRAWN if decision is DRAW else Answer(decision)
        log, stored = view.take_logs()
        return Answer(decision, log=log, stored=stored)
    except Exception as error:
        log, stored = view.take_logs()
        return Answer(error=_as_error(error, "finish" if is_final else "next"), log=log, stored=stored)


def _update(view: SequenceView, ask: Ask) -> None:
    if ask.request is not None:
        return  # the view already has the prompt
    if ask.backtrack:
        del view.tokens[-ask.backtrack :]
        view.num_prompt = min(view.num_prompt, len(view.tokens))
    view.tokens.extend(ask.tokens)
    view.new_tokens, view.num_rewound = ask.tokens, ask.backtrack
    view.sampled, view.candidates, view.may_force = ask.sampled, ask.candidates, ask.may_force
    view.rewritten_by = ask.rewritten_by if ask.changes else ""
    if view._probe_names:
        view.probes = dict(zip(view._probe_names, ask.probes, strict=False))


def _as_error(error: Exception, where: str) -> ControllerError:
    if isinstance(error, ControllerError):
        return error
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = f" (line {trace.tb_lineno} of {trace.tb_frame.f_code.co_name})" if trace is not None else ""
    return ControllerError(f"the controller's {where}() raised {error!r}{line}")
