"""The pool of requests with several controllers. It runs none itself: each lives in the pool of its kind, as a sequence
of its own there, and `Output` says what they want together.

The pools are shared with the engine, which asks them about all other requests. A pool hands over whatever answers it
has, so `SharedPool` keeps apart whose they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace

from bridle.controllers.composed_output import Output, Part
from bridle.controllers.composition import Composed, name_of
from bridle.engine.decision import Decision
from bridle.engine.interfaces import Answer, Ask, ControllerPool, ForesightedPool
from bridle.engine.request import Request
from bridle.errors import ControllerError, InternalError

#: The sequences of composed controllers have numbers from here on, above all of the engine's.
_PARTS = 1 << 48

Prompt = tuple[int, ...]


def with_composed(pools: Iterable[ControllerPool], vocab_size: int) -> tuple[ControllerPool, ...]:
    """The pools, and one more for requests with several controllers that live in these."""
    shared = [_Foresighted(pool) if isinstance(pool, ForesightedPool) else SharedPool(pool) for pool in pools]
    return (*shared, ComposedPool(shared, vocab_size))


class SharedPool:
    """A pool that the engine and the composed pool both ask."""

    def __init__(self, pool: ControllerPool) -> None:
        self._pool = pool
        self._answers: dict[int, Answer] = {}  # for the engine
        self._parts: dict[int, Answer] = {}  # for the composed pool
        self.num_composed = 0  # live requests of the composed pool

    @property
    def is_busy(self) -> bool:
        """As the pool is; answers that were kept are to be fetched, too."""
        return self._pool.is_busy or bool(self._answers)

    def accepts(self, controller: object) -> bool:
        """As the pool does."""
        return self._pool.accepts(controller)

    def open(self, request: Request) -> Future[Prompt]:
        """As the pool does."""
        return self._pool.open(request)

    def abandon(self, request: Request) -> None:
        """As the pool does."""
        self._pool.abandon(request)

    def ask(self, asks: Sequence[Ask]) -> None:
        """As the pool does."""
        self._pool.ask(asks)

    def close(self, seq_ids: Sequence[int]) -> None:
        """As the pool does."""
        for seq_id in seq_ids:
            (self._parts if seq_id >= _PARTS else self._answers).pop(seq_id, None)
        self._pool.close(seq_ids)

    def shutdown(self) -> None:
        """As the pool does."""
        self._pool.shutdown()

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """The answers for the engine."""
        if not (self.num_composed or self._answers):
            return self._pool.collect(seq_ids, deadline)
        self._fetch([seq_id for seq_id in seq_ids if seq_id not in self._answers], deadline)
        answers, self._answers = self._answers, {}
        return answers

    def take_parts(self, seq_ids: Sequence[int], deadline: float | None, *, may_ask: bool) -> Mapping[int, Answer]:
        """The answers for the composed pool: those that were kept, or else, if it `may_ask`, those of the pool."""
        if may_ask and not self._parts:
            self._fetch(seq_ids, deadline)
        answers, self._parts = self._parts, {}
        return answers

    def _fetch(self, seq_ids: Sequence[int], deadline: float | None) -> None:
        answers = self._pool.collect(seq_ids, deadline if seq_ids else None)
        for seq_id, answer in answers.items():
            (self._parts if seq_id >= _PARTS else self._answers)[seq_id] = answer


class _Foresighted(SharedPool):
    def foresee(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        """As the pool does."""
        assert isinstance(self._pool, ForesightedPool)
        return self._pool.foresee(seq_id, tokens)


class ComposedPool:
    """Runs requests whose controller is `Composed`, in the pools that it is given."""

    is_busy = False  # the pools of the parts say it

    def __init__(self, pools: Sequence[SharedPool], vocab_size: int) -> None:
        self._pools = pools
        self._vocabulary = (1 << vocab_size) - 1
        self._opened: dict[str, _Opening] = {}
        self._live: dict[int, Output] = {}
        self._asks: dict[ControllerPool, list[Ask]] = {pool: [] for pool in pools}
        self._answers: dict[int, Answer] = {}

    # -- coming --------------------------------------------------------------------------------------------

    def accepts(self, controller: object) -> bool:
        """Whether all of its parts are run here."""
        return isinstance(controller, Composed) and all(self._pool_of(part) for part in controller.parts)

    def _pool_of(self, part: object) -> SharedPool | None:
        return next((pool for pool in self._pools if pool.accepts(part)), None)

    def open(self, request: Request) -> Future[Prompt]:
        """Make all controllers, the outer one first. Each gets the prompt as those before it leave it; one that
        rewrites what others have seen is refused."""
        assert isinstance(request.controller, Composed)
        pools = [pool for part in request.controller.parts if (pool := self._pool_of(part)) is not None]
        opening = _Opening(request, request.controller.parts, pools, self._opened)
        opening.next(request.prompt)
        return opening.future

    def abandon(self, request: Request) -> None:
        """Drop all that `open` made."""
        opening = self._opened.pop(request.id, None)
        if opening is not None:
            opening.abandon()

    # -- the step ------------------------------------------------------------------------------------------

    def ask(self, asks: Sequence[Ask]) -> None:
        """Ask the controllers: forks are made first, while their parents are as they were."""
        for ask in asks:
            if ask.request is not None:
                self._begin(ask.seq_id, ask.request)
            elif ask.parent is not None and ask.parent in self._live:
                ids = [_part_id(number, ask.seq_id) for number in range(len(self._live[ask.parent].parts))]
                self._add(ask.seq_id, self._live[ask.parent].fork(ask, ids))
        for ask in asks:
            output = self._live.get(ask.seq_id)
            if output is not None:
                self._tell(ask, output)
        self._send()

    def _tell(self, ask: Ask, output: Output) -> None:
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
            Part(part_id := _part_id(number, seq_id), pool, untold=Ask(part_id, request=part))
            for number, (pool, part) in enumerate(zip(opening.pools, opening.requests, strict=True))
        ]
        self._add(seq_id, Output(opening.names, self._vocabulary, parts, len(opening.prompt)))

    def _add(self, seq_id: int, output: Output) -> None:
        self._live[seq_id] = output
        for pool in self._pools:
            pool.num_composed += 1

    def _spread(self, output: Output) -> None:
        for pool, ask in output.tells():
            self._asks[pool].append(ask)

    def _send(self) -> None:
        for pool, asks in self._asks.items():
            if asks:
                self._asks[pool] = []
                pool.ask(asks)

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """The answers on which all controllers of an output agree; waits for those of `seq_ids` until `deadline`."""
        wanted, is_first = () if deadline is None else tuple(seq_ids), True
        while self._live and self._hear_some(wanted, deadline, is_first):
            self._send()
            is_first = False
        answers, self._answers = self._answers, {}
        return answers

    def _hear_some(self, wanted: Sequence[int], deadline: float | None, is_first: bool) -> bool:
        """Take in what controllers have answered; returns whether any has. The engine has just asked their pools; so
        the first time they are asked only for what is to be waited for."""
        due = [output for seq_id in wanted if (output := self._live.get(seq_id)) is not None and output.is_owed]
        heard: set[int] = set()
        for pool in self._pools:
            ids = [part.id for output in due for part in output.parts if part.is_asked and part.pool is pool]
            for part_id, answer in pool.take_parts(ids, deadline, may_ask=bool(ids) or not is_first).items():
                self._hear(part_id, answer, heard)
        for seq_id in heard:
            self._decide(seq_id, self._live[seq_id])
        return bool(heard)

    def _hear(self, part_id: int, answer: Answer, heard: set[int]) -> None:
        number, seq_id = divmod(part_id, _PARTS)
        output = self._live.get(seq_id)
        if output is None:
            return
        try:
            output.hear(number - 1, answer)
        except ControllerError as error:
            self._answers[seq_id] = output.failure(_named(error, number - 1, output))
        else:
            heard.add(seq_id)

    def _decide(self, seq_id: int, output: Output) -> None:
        """Answer for an output, if all is known; or show its controllers one more token."""
        if not output.is_owed or output.is_waiting:
            return
        try:
            decision = None if output.is_final else output.advance()
        except ControllerError as error:
            self._answers[seq_id] = output.failure(error)
        except (TypeError, ValueError, AttributeError) as error:
            self._answers[seq_id] = output.failure(ControllerError(f"a decision is malformed: {error}"))
        else:
            if decision is not None or output.is_final:
                self._answers[seq_id] = output.answer(decision)
            else:
                self._spread(output)

    # -- going ---------------------------------------------------------------------------------------------

    def close(self, seq_ids: Sequence[int]) -> None:
        """Drop the controllers of these outputs."""
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
        """Forget everything; the pools of the parts end by themselves."""
        self._opened.clear()
        self._live.clear()
        self._answers.clear()


def _part_id(number: int, seq_id: int) -> int:
    return (number + 1) * _PARTS + seq_id


def _named(error: ControllerError, number: int, output: Output) -> ControllerError:
    """The error of one controller, with its name."""
    named = copy.copy(error)
    named.args = (f"controller {number + 1} ({output.names[number]}): {error}",)
    return named


class _Opening:
    """Makes the controllers of a request one after the other. Once all are there it is in `opened`, and `future` gives
    the prompt."""

    def __init__(
        self,
        request: Request,
        parts: Sequence[object],
        pools: Sequence[SharedPool],
        opened: dict[str, _Opening],
    ) -> None:
        self.request, self.pools, self.prompt = request, pools, request.prompt
        self.names = [name_of(part) for part in parts]
        self.future: Future[Prompt] = Future()
        self._opened = opened
        self.requests = [
            replace(request, id=f"{request.id}/{number}", controller=part) for number, part in enumerate(parts)
        ]
        self._num_open = 0

    def next(self, prompt: Prompt) -> None:
        """Make the next controller, which gets `prompt`."""
        self.prompt = prompt
        number = self._num_open
        self.requests[number] = request = replace(self.requests[number], prompt=prompt)
        self.pools[number].open(request).add_done_callback(self._take)

    def _take(self, opened: Future[Prompt]) -> None:
        try:
            prompt = tuple(opened.result())
        except BaseException as error:  # a cancelled opening is one too
            self._fail(error)
            return
        number, self._num_open = self._num_open, self._num_open + 1
        if prompt != self.prompt and number:
            self._fail(ControllerError(self._too_late(number)))
        elif self.future.cancelled():
            self.abandon()
        elif self._num_open < len(self.requests):
            self._go_on(prompt)
        else:
            self.prompt = prompt
            self._conclude()

    def _go_on(self, prompt: Prompt) -> None:
        try:
            self.next(prompt)
        except Exception as error:
            self._fail(InternalError(f"a controller could not be opened: {error!r}"))

    def _too_late(self, number: int) -> str:
        return (
            f"controller {number + 1} ({self.names[number]}) rewrites the prompt, which controller {number} "
            f"({self.names[number - 1]}) has seen; name it first"
        )

    def _conclude(self) -> None:
        self._opened[self.request.id] = self
        try:
            self.future.set_result(self.prompt)
        except InvalidStateError:  # cancelled meanwhile
            self._opened.pop(self.request.id, None)
            self.abandon()

    def _fail(self, error: BaseException) -> None:
        self.abandon()
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            pass

    def abandon(self) -> None:
        """Drop the controllers that were made."""
        for pool, request in zip(self.pools, self.requests[: self._num_open], strict=False):
            pool.abandon(request)
        self._num_open = 0
