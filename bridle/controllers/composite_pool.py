"""The pool of requests with several controllers. The pool runs no controller itself: each controller has its own
sequence in the pool of its kind, and `CompositeSequence` combines their decisions.

The pools are shared with the engine, which asks them about other requests.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

from bridle.controllers.composite_member import CompositeMember
from bridle.controllers.composite_opening import Opening
from bridle.controllers.composite_output import CompositeSequence
from bridle.controllers.composition import Composed, is_lenient, shown_number
from bridle.controllers.shared_pool import FIRST_PART, SharedPool
from bridle.controllers.sync_pool import NoopPool
from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, Ask, ControllerPool, check_pools
from bridle.engine.request import Request
from bridle.errors import ControllerError

_log = logging.getLogger(__name__)


def with_composed(pools: Iterable[ControllerPool], vocab_size: int) -> tuple[ControllerPool, ...]:
    """Return the pools, and one more pool for requests with several controllers in these pools."""
    check_pools(pools := tuple(pools))
    both = [SharedPool(pool) for pool in pools]
    return (*both, ComposedPool(both, vocab_size))


class ComposedPool(ControllerPool):
    """Runs requests whose controller is `Composed`, in the given pools."""

    def __init__(self, pools: Sequence[SharedPool], vocab_size: int) -> None:
        self._neutral = SharedPool(NoopPool())
        self._pools = (*pools, self._neutral)
        self._vocabulary = (1 << vocab_size) - 1
        self._opened: dict[str, Opening] = {}
        self._live: dict[int, CompositeSequence] = {}
        self._asks: dict[ControllerPool, list[Ask]] = {pool: [] for pool in self._pools}
        self._answers: dict[int, Answer] = {}

    # -- opening -------------------------------------------------------------------------------------------

    def accepts(self, controller: object) -> bool:
        """Return whether the pools can run all controllers of a composed controller."""
        return isinstance(controller, Composed) and all(self._pool_of(part) for part in controller.parts)

    def _pool_of(self, part: object) -> SharedPool | None:
        return next((pool for pool in self._pools if pool.accepts(part)), None)

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Create all controllers, the outer one first. Only the first may rewrite the prompt; a later one that rewrites
        it is refused."""
        assert isinstance(request.controller, Composed)
        pools = [pool for part in request.controller.parts if (pool := self._pool_of(part)) is not None]
        opening = Opening(request, request.controller, pools, self._opened)
        opening.next(request.prompt)
        return opening.future

    def modules_of(self, request: Request) -> tuple[tuple[str, str], ...]:
        opening = self._opened.get(request.id)
        return () if opening is None else opening.modules

    def abandon(self, request: Request) -> None:
        opening = self._opened.pop(request.id, None)
        if opening is not None:
            opening.abandon()

    # -- the step ------------------------------------------------------------------------------------------

    def ask(self, asks: Sequence[Ask]) -> None:
        """Ask the controllers. Forks are made first, before their parents change."""
        for ask in asks:
            if ask.request is not None:
                self._begin(ask.seq_id, ask.request)
            elif ask.parent is not None and ask.parent in self._live:
                ids = [_part_id(number, ask.seq_id) for number in range(len(self._live[ask.parent].parts))]
                self._add(ask.seq_id, self._live[ask.parent].fork(ask, ids))
        for ask in asks:
            output = self._live.get(ask.seq_id)
            if output is None:
                continue
            if output.is_plain and not (
                ask.backtrack or ask.final or ask.candidates or ask.changes or ask.probes or ask.parent is not None
            ):
                output.ask_on(ask, self._asks)
            else:
                self._tell(ask, output)
        self._send()

    def _tell(self, ask: Ask, output: CompositeSequence) -> None:
        try:
            output.report(ask)
        except ControllerError as error:
            self._answers[ask.seq_id] = output.failure(error)
        else:
            self._spread(output)
            self._decide(ask.seq_id, output)

    def _begin(self, seq_id: int, request: Request) -> None:
        opening = self._opened.pop(request.id)
        parts = [
            CompositeMember(
                part_id := _part_id(number, seq_id),
                pool,
                is_lenient(part.controller),
                number < len(opening.demands) and opening.demands[number].on_failure == "skip",
                untold=Ask(part_id, request=part),
            )
            for number, (pool, part) in enumerate(zip(opening.pools, opening.requests, strict=True))
        ]
        output = CompositeSequence(
            opening.names, self._vocabulary, parts, len(opening.prompt), num_demands=len(opening.demands)
        )
        for number in opening.failed:
            self._leave_out(parts[number])
        self._add(seq_id, output)

    def _leave_out(self, part: CompositeMember) -> None:
        """Continue without a controller that failed."""
        part.pool.close([part.id])
        part.pool, part.may_go, part.script, part.answer, part.ahead = self._neutral, False, None, None, ()

    def _add(self, seq_id: int, output: CompositeSequence) -> None:
        self._live[seq_id] = output
        for pool in self._pools:
            pool.num_composed += 1

    def _spread(self, output: CompositeSequence) -> None:
        for pool, ask in output.next_asks():
            self._asks[pool].append(ask)

    def _send(self) -> bool:
        """Send the asks that must be sent now, and process immediate answers. Returns whether a controller was
        asked."""
        has_asked = False
        while due := [pool for pool in self._pools if self._asks[pool]]:
            has_asked = True
            for pool in due:
                asks, self._asks[pool] = self._asks[pool], []
                pool.ask(asks)
            self._hear_kept([pool for pool in due if pool.answers_at_once], may_ask=True)
        return has_asked

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """Return the joint answers of outputs. Waits until `deadline` for the answers of `seq_ids`."""
        if self._live:  # the engine has just asked the pools, so their answers were kept
            is_first = not (self._hear_kept(self._pools) and self._send())
            wanted = () if deadline is None else [each for each in seq_ids if each not in self._answers]
            while (wanted or not is_first) and self._hear_some(wanted, deadline, is_first):
                is_first = not self._send()
        answers, self._answers = self._answers, {}
        return answers

    def _hear_some(self, wanted: Sequence[int], deadline: float | None, is_first: bool) -> bool:
        """Process answers of controllers, and wait for the answers of the outputs `wanted`. Returns whether there were
        any answers. In the first call, the pools are asked only for the outputs `wanted`."""
        due: dict[ControllerPool, list[int]] = {}
        for seq_id in wanted:
            output = self._live.get(seq_id)
            if output is not None and output.is_owed and output.num_asked:
                for part in output.parts:
                    if part.is_asked:
                        due.setdefault(part.pool, []).append(part.id)
        taken = [
            pool.take_parts(ids := due.get(pool, ()), deadline, may_ask=bool(ids) or not is_first)
            for pool in self._pools
        ]
        return self._hear_all(taken)

    def _hear_kept(self, pools: Iterable[SharedPool], *, may_ask: bool = False) -> bool:
        """Process the available answers, without waiting."""
        return self._hear_all([pool.take_parts((), None, may_ask=may_ask) for pool in pools])

    def _hear_all(self, taken: Iterable[Mapping[int, Answer]]) -> bool:
        """Process answers of single controllers. Returns whether there were any."""
        live, heard, has_heard = self._live, dict[int, CompositeSequence](), False
        for answers in taken:
            for part_id, answer in answers.items():
                number, seq_id = divmod(part_id, FIRST_PART)
                output, has_heard = live.get(seq_id), True
                if output is None:
                    continue
                if not output.note_draw(number - 1, answer):
                    self._hear(number, seq_id, output, answer, heard)
                elif not output.num_asked:
                    self._answers[seq_id] = output.draw_together(answer)
        for seq_id, output in heard.items():
            self._decide(seq_id, output)
        return has_heard

    def _hear(
        self, number: int, seq_id: int, output: CompositeSequence, answer: Answer, heard: dict[int, CompositeSequence]
    ) -> None:
        part = output.parts[number - 1]
        if answer.error is not None and part.may_go:
            _log.error("policy %s failed and does not apply to this output: %s", output.names[number - 1], answer.error)
            self._leave_out(part)
            answer = Answer(Decision.sample())
        try:
            output.note_answer(number - 1, answer)
        except ControllerError as error:
            self._answers[seq_id] = output.failure(_named(error, number - 1, output))
        else:
            heard[seq_id] = output

    def _decide(self, seq_id: int, output: CompositeSequence) -> None:
        """Answer for an output if all answers are known. Otherwise, show its controllers more forced tokens."""
        if not output.is_owed or output.is_waiting:
            return
        try:
            decision = None if output.is_final else self._advance(output)
        except ControllerError as error:
            self._answers[seq_id] = output.failure(error)
        except (TypeError, ValueError, AttributeError) as error:
            self._answers[seq_id] = output.failure(ControllerError(f"a decision is malformed: {error}"))
        else:
            if decision is not None or output.is_final:
                self._answers[seq_id] = output.answer(decision)

    def _advance(self, output: CompositeSequence) -> Decision | None:
        """Return the joint decision, or None if a member has to answer first."""
        num_shown = -1
        while len(output.shown) != num_shown and not output.is_waiting:
            num_shown = len(output.shown)
            decision = output.advance()
            if decision is not None:
                return output.with_scales(decision)
            self._spread(output)
        return None

    # -- closing -------------------------------------------------------------------------------------------

    def close(self, seq_ids: Sequence[int]) -> None:
        parts: dict[ControllerPool, list[int]] = {}
        for seq_id in seq_ids:
            self._answers.pop(seq_id, None)
            output = self._live.pop(seq_id, None)
            for part in () if output is None else output.parts:
                parts.setdefault(part.pool, []).append(part.id)
            for pool in () if output is None else self._pools:
                pool.num_composed -= 1
        for owner, ids in parts.items():
            owner.close(ids)

    def shutdown(self) -> None:
        """Drop all outputs. The engine shuts down the pools of the single controllers."""
        self._opened.clear()
        self._live.clear()
        self._answers.clear()


def _part_id(number: int, seq_id: int) -> int:
    return (number + 1) * FIRST_PART + seq_id


def _named(error: ControllerError, number: int, output: CompositeSequence) -> ControllerError:
    """Return the error of one controller, with the controller's name."""
    named = copy.copy(error)
    name = shown_number(number, output.names, output.num_demands)
    if number < output.num_demands:
        _log.error("%s failed: %s", name, error)
        named.args = (f"{name} failed",)
    else:
        named.args = (f"{name}: {error}",)
    return named
