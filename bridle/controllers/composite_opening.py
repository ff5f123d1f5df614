"""Creates the controllers of a request with several controllers, each in the pool that runs its kind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from bridle.controllers.composition import Composed
from bridle.controllers.shared_pool import SharedPool
from bridle.engine.request import Request
from bridle.errors import ControllerError, InternalError, Overloaded
from bridle.threads import set_future_result

Prompt = tuple[int, ...]
_log = logging.getLogger(__name__)


class Opening:
    """Creates the controllers of a request one after the other. When all are created, the result is in `opened`, and
    `future` returns the prompt. An operator's controllers come last: they get the final prompt and do not change it.
    `failed` has the numbers of controllers that failed and are left out."""

    def __init__(
        self, request: Request, controller: Composed, pools: Sequence[SharedPool], opened: dict[str, Opening]
    ) -> None:
        self.request, self.pools, self.prompt = request, pools, request.prompt
        self.names, self.demands = controller.names, controller.demands
        self.failed: list[int] = []
        self.future: Future[Prompt] = Future()
        self._opened = opened
        self.requests = [
            replace(request, id=f"{request.id}/{number}", controller=part, is_composed=True)
            for number, part in enumerate(controller.parts)
        ]
        first = len(self.demands)
        self._order = [*range(first, len(self.requests)), *range(first)]
        self._num_open = 0

    def next(self, prompt: Prompt) -> None:
        """Create the next controller, which gets `prompt`."""
        self.prompt = prompt
        number = self._order[self._num_open]
        self.requests[number] = request = replace(self.requests[number], prompt=prompt)
        self.pools[number].open(request).add_done_callback(self._take)

    def _take(self, opened: Future[Prompt]) -> None:
        try:
            prompt = tuple(opened.result())
        except BaseException as error:  # a cancelled opening is an error too
            number = self._order[self._num_open]
            if number >= len(self.demands):
                self._fail(error)
                return
            _log.error("controller %s could not be created: %r", self.names[number], error)
            # not a failure of the policy: otherwise users could cause it to be left out
            if isinstance(error, Overloaded):
                self._fail(Overloaded(f"{self.names[number]} has no room now; try again", error.retry_after))
                return
            if self.demands[number].on_failure != "skip" or self.future.cancelled():
                self._fail(ControllerError(f"{self.names[number]} failed"))
                return
            self.failed.append(number)
            prompt = self.prompt
        turn, self._num_open = self._num_open, self._num_open + 1
        number = self._order[turn]
        if prompt != self.prompt and number < len(self.demands):
            self._fail(ControllerError(f"{self.names[number]} failed: it rewrites the prompt, which no policy may"))
        elif prompt != self.prompt and turn:
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
            f"controller {number + 1 - len(self.demands)} ({self.names[number]}) rewrites the prompt, which controller "
            f"{number - len(self.demands)} ({self.names[number - 1]}) has seen; name it first"
        )

    def _conclude(self) -> None:
        self._opened[self.request.id] = self
        if not set_future_result(self.future, self.prompt):  # the opening was cancelled meanwhile
            self._opened.pop(self.request.id, None)
            self.abandon()

    def _fail(self, error: BaseException) -> None:
        self.abandon()
        set_future_result(self.future, error)

    @property
    def modules(self) -> tuple[tuple[str, str], ...]:
        """Return the names of modules and their hashes, in the order of the controllers."""
        made = [number for number in range(len(self.pools)) if number not in self.failed]
        return tuple(each for number in made for each in self.pools[number].modules_of(self.requests[number]))

    def abandon(self) -> None:
        """Drop the controllers that were already created."""
        for number in self._order[: self._num_open]:
            if number not in self.failed:
                self.pools[number].abandon(self.requests[number])
        self._num_open = 0
