"""Makes the controllers of a request that has several, each in the pool of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace

from bridle.controllers.shared_pool import SharedPool
from bridle.engine.request import Request, name_of
from bridle.errors import ControllerError, InternalError

Prompt = tuple[int, ...]


class Opening:
    """Makes the controllers of a request one after the other. Once all are there it is in `opened`, and `future` gives
    the prompt."""

    def __init__(
        self,
        request: Request,
        parts: Sequence[object],
        pools: Sequence[SharedPool],
        opened: dict[str, Opening],
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
        with suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_exception(error)

    def abandon(self) -> None:
        """Drop the controllers that were made."""
        for pool, request in zip(self.pools, self.requests[: self._num_open], strict=False):
            pool.abandon(request)
        self._num_open = 0
