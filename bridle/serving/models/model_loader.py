"""Loads models when requests name them and unloads idle models, within a memory limit.

All decisions are made in one event loop. Slow work (downloading, loading, closing) runs in threads. So neither the
event loop nor the engines of other models wait. Models are loaded one at a time, in order. Several requests may wait
for one load. This module does not use the names of models.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bridle.errors import BridleError, EngineClosed, ModelUnavailable, RequestCancelled
from bridle.load_progress import LoggedSteps, Report, silent, watched
from bridle.serving.models.model_memory import ModelMemory, Needs, least_bytes, with_kv
from bridle.serving.models.model_slot import Slot
from bridle.threads import start_thread

if TYPE_CHECKING:
    from bridle.config import ModelConfig
    from bridle.serving.models.loading import LoadedModel

_log = logging.getLogger(__name__)

#: Number of seconds for which the error of a failed load is kept.
FAILURE_SECONDS = 30.0
#: Number of seconds after which a client may ask again for a model that is no longer served. The server may have been
#: restarted by then.
GIVEN_UP_SECONDS = 60.0
#: Shows the progress that is reported to its `Report`, under a title.
Show = Callable[[str], AbstractContextManager[Report]]


def unseen(title: str) -> AbstractContextManager[Report]:
    """Show nothing. A `Show` for loads whose progress is not displayed."""
    return nullcontext(silent)


class ModelLoader(Protocol):
    """Loads models. All methods block and are called in threads. The methods raise an error that explains what is wrong
    with the model."""

    def measure(self, config: ModelConfig, name: str) -> Needs:
        """Measure the memory that the model takes in addition to its KV cache. Measuring may download the model."""

    def make_room(self, config: ModelConfig) -> ModelConfig:
        """Return `config` with memory reserved for adapters. The reserved amount does not depend on whether the model
        is loaded."""

    def load(self, config: ModelConfig, name: str, progress: Report) -> LoadedModel:
        """Load and start a model. An error that `progress` raises ends the loading."""


class ModelManager:
    """Loads models into slots and unloads them again."""

    def __init__(
        self, loader: ModelLoader, max_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.memory = ModelMemory(max_bytes)
        self._loader = loader
        self._clock = clock
        self._queue = asyncio.Lock()  # held by the load whose turn it is
        self._change: asyncio.Future[None] | None = None  # while there is no room: set when memory may be free
        self._is_closed = False

    def fill(self, slots: Iterable[Slot], keeps_share: bool, show: Show = unseen) -> None:
        """Load the given models now, one after the other. The call blocks and needs no event loop.

        The memory that is left by weights and adapters is split evenly among the KV caches. With `keeps_share`, a share
        for one more KV cache stays free. `show` displays the progress of each model. Raises the errors of loading.
        """
        waiting = []
        for slot in slots:
            with show(f"Loading {slot.name}") as report:
                waiting.append((slot, self._measure(slot, report)))
        needed = sum(least_bytes(_config(slot), needs) for slot, needs in waiting)
        adapters = sum(needs.adapters for _, needs in waiting)
        self.memory.check_possible(" and ".join(slot.name for slot, _ in waiting), needed, adapters)
        while waiting:
            num_shares = len(waiting) + keeps_share
            share = (self.memory.left - sum(needs.total for _, needs in waiting)) // num_shares
            slot, needs = waiting.pop(0)
            with show(f"Loading {slot.name}") as report:
                self._keep(slot, self._load_now(slot, self._reserve(slot, needs, share), report))

    def keep(self, slot: Slot) -> None:
        """Count the memory of a model that was loaded elsewhere."""
        assert slot.model is not None
        self._keep(slot, slot.model)

    async def fetch(self, slot: Slot, timeout: float | None) -> None:
        """Wait until the model of the slot is loaded. Loading of the model is started if necessary. Raises
        `ModelUnavailable`."""
        self._check_open()
        if slot.failure is not None and self._clock() < slot.failed_until:
            raise _again(slot.failure)
        if slot.task is None:
            slot.failure = None
            slot.task = asyncio.create_task(self._load(slot), name=f"load {slot.name}")
        await self._wait(slot, slot.task, timeout)
        if slot.model is None:
            self._check_open()
            assert slot.failure is not None
            raise _again(slot.failure)

    async def empty(self, slot: Slot) -> None:
        """Close an idle model and free its memory."""
        assert slot.is_idle
        assert slot.model is not None
        model, slot.model = slot.model, None
        num_bytes = self.memory.release(slot)
        self.memory.closing += num_bytes
        _log.info("unloading the model %s", slot.name)

        def count(_: object) -> None:
            self.memory.closing -= num_bytes
            self.notice()

        closing = asyncio.wrap_future(start_thread(lambda: _close(model), "bridle-unload"))
        closing.add_done_callback(count)
        await asyncio.shield(closing)

    def restart(self, slot: Slot, pause: float) -> None:
        """After `pause` seconds, load a model whose engine has failed once more. Until the model is loaded, requests
        for it are refused. The model keeps its memory and its settings. `slot.is_restarting` is true until a load
        succeeds."""
        model, slot.model, slot.is_restarting = slot.model, None, True
        if model is not None:
            slot.adapters, slot.control_vectors = tuple(model.adapters.list()), model.control_vectors
        if pause or model is None:
            slot.failure = ModelUnavailable(f"the engine of {slot.name!r} failed and is started again", max(pause, 1.0))
            slot.failed_until = self._clock() + pause
        slot.is_filling = True  # so that a client that disconnects does not end the load
        slot.stage = "restarting"
        slot.task = asyncio.create_task(self._load_again(slot, model, pause), name=f"restart {slot.name}")

    def give_up(self, slot: Slot, reason: str) -> None:
        """Close a model whose engine has failed. From now on the model's requests are refused with `reason`. The memory
        of the model stays reserved, because a step that hangs still uses it."""
        model, slot.model, slot.is_restarting, slot.is_given_up = slot.model, None, True, True
        slot.failure, slot.failed_until = ModelUnavailable(reason, GIVEN_UP_SECONDS), math.inf
        if model is not None:
            start_thread(lambda: _close(model), "bridle-unload")

    async def _load_again(self, slot: Slot, failed: LoadedModel | None, pause: float) -> None:
        if failed is not None:
            start_thread(lambda: _close(failed), "bridle-unload")
        try:
            await asyncio.sleep(pause)
            async with self._queue:
                loading = start_thread(lambda: self._load_like_before(slot), "bridle-load")
                self._keep(slot, await asyncio.wrap_future(loading))
            slot.failure, slot.is_restarting, slot.adapters, slot.control_vectors = None, False, (), None
        except Exception as error:
            self._fail(slot, error)
        finally:
            slot.task, slot.is_filling, slot.stage = None, False, ""

    def _load_like_before(self, slot: Slot) -> LoadedModel:
        """Load a model again with the settings, adapters and control vectors that it had before its engine failed."""
        model = self._load_now(slot, slot.filled or _config(slot))
        if model.control_vectors is not None and slot.control_vectors is not None:
            model.control_vectors.restore(slot.control_vectors)
        for adapter in slot.adapters:
            if adapter.name not in model.adapters:
                try:
                    model.adapters.add(adapter.name, adapter.source, adapter.revision)
                except BridleError as error:
                    _log.warning(
                        "the adapter %s of the model %s could not be loaded again: %s", adapter.name, slot.name, error
                    )
        return model

    def now(self) -> float:
        """Return the time of the clock by which models are ordered by their last use."""
        return self._clock()

    def notice(self) -> None:
        """Record the end of a lease on a model or of a wait for a model. Loads that wait for memory then check it."""
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def close(self, drain: float = 0.0) -> None:
        """Close every model. Loads in progress end as soon as they can. Idempotent; safe from any thread."""
        self._is_closed = True
        for slot in list(self.memory.slots):
            if slot.model is not None:
                slot.model.close(drain)

    # -- one load ----------------------------------------------------------------------------------------------

    async def _wait(self, slot: Slot, task: asyncio.Task[None], timeout: float | None) -> None:
        slot.num_waiting += 1
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(task)
        except TimeoutError:
            stage = f" ({slot.stage})" if slot.stage else ""
            raise ModelUnavailable(f"the model {slot.name!r} is not loaded after {timeout:g} s{stage}") from None
        finally:
            slot.num_waiting -= 1
            if slot.num_waiting == 0 and slot.task is task and not slot.is_filling:
                slot.task = None  # no request waits any more, and no work is lost
                task.cancel()

    async def _load(self, slot: Slot) -> None:
        """Load the slot's model, or store the error in the slot."""
        task = asyncio.current_task()
        try:
            slot.stage, slot.share = "finding the model", 0.0
            needs = await self._find(slot)
            slot.stage = "waiting for its turn"
            async with self._queue:
                await self._fill_in_turn(slot, needs)
        except Exception as error:
            self._fail(slot, error)
        finally:
            if slot.task is task:  # this load was not cancelled and replaced meanwhile
                slot.task, slot.stage = None, ""

    async def _find(self, slot: Slot) -> Needs:
        """Return the memory that the slot's model needs. Only one thread per slot measures the memory. After a
        cancelled load, the call waits for the thread that measures for that load. This thread ends when it knows the
        memory, or at its next progress report."""
        while True:
            if slot.finding is None or slot.finding.done():
                measuring = start_thread(lambda: self._measure(slot, _while_wanted(slot)), "bridle-find")
                slot.finding = asyncio.wrap_future(measuring)
                slot.finding.add_done_callback(partial(_found, slot))
            finding: asyncio.Future[Needs] = slot.finding
            try:
                return await asyncio.shield(finding)
            except RequestCancelled:
                _log.debug("the lookup of the model %s was cancelled; it starts again", slot.name)

    async def _fill_in_turn(self, slot: Slot, needs: Needs) -> None:
        slot.stage = "waiting for room"
        await self._make_room(slot, needs)
        config = self._reserve(slot, needs, (self.memory.left - needs.total) // 2)
        slot.is_filling = True
        try:
            loading = start_thread(lambda: self._load_now(slot, config), "bridle-load")
            self._keep(slot, await asyncio.wrap_future(loading))
        finally:
            slot.is_filling = False
            if slot.model is None:
                self.memory.release(slot)

    async def _make_room(self, slot: Slot, needs: Needs) -> None:
        """Close idle models, the least recently used first, until enough memory is free. While all models are in use,
        the call waits for one to become idle."""
        needed = least_bytes(_config(slot), needs)
        self.memory.check_possible(repr(slot.name), needed, needs.adapters)
        while not self.memory.has(needed):
            idle = self.memory.oldest_idle()
            if idle is not None:
                await self.empty(idle)
                continue
            self._change = asyncio.get_running_loop().create_future()
            await self._change

    def _reserve(self, slot: Slot, needs: Needs, share: int) -> ModelConfig:
        """Reserve the memory that the slot's model will take. Returns the configuration for loading, with the memory
        share of the KV cache."""
        if self.memory.max_bytes is None:
            self.memory.reserve(slot, needs.total)
            return _config(slot)
        config = with_kv(_config(slot), needs.weights, share)
        self.memory.reserve(slot, needs.total + (config.kv_memory or config.max_kv_memory or 0))
        return config

    def _measure(self, slot: Slot, report: Report = silent) -> Needs:
        """Return the memory that the model needs. The model's files are downloaded first if necessary."""
        with watched(self._told(slot, report)):
            return self._loader.measure(_config(slot), slot.name)

    def _told(self, slot: Slot, report: Report) -> Report:
        """Return a `Report` that reports the progress of a load to its slot, to the log and to `report`. The `Report`
        stops the load if the manager is closed."""
        steps = LoggedSteps(f"loading {slot.name}", _log)

        def progress(what: str, share: float) -> None:
            self._check_open()
            steps(what, share)
            slot.stage, slot.share = what, share
            report(what, share)

        return progress

    def _load_now(self, slot: Slot, config: ModelConfig, report: Report = silent) -> LoadedModel:
        slot.filled = config
        model = self._loader.load(config, slot.name, self._told(slot, report))
        if self._is_closed:
            model.close()
            self._check_open()
        return model

    def _keep(self, slot: Slot, model: LoadedModel) -> None:
        slot.model, slot.stage, slot.last_used = model, "", self._clock()
        self.memory.reserve(slot, model.num_bytes or slot.num_bytes)

    def _fail(self, slot: Slot, error: Exception) -> None:
        if isinstance(error, BridleError):
            _log.warning("the model %s could not be loaded: %s", slot.name, error)
        else:
            _log.error("the model %s could not be loaded", slot.name, exc_info=error)
        if not isinstance(error, EngineClosed):
            message = f"the model {slot.name!r} could not be loaded: {_public(slot, error)}"
            slot.failure = ModelUnavailable(message, FAILURE_SECONDS)
            slot.failed_until = self._clock() + FAILURE_SECONDS

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the server is shutting down and loads no models")


def _while_wanted(slot: Slot) -> Report:
    """Return a report function that stops the loading if the load of its slot was cancelled."""

    def progress(stage: str, share: float) -> None:
        if slot.task is None:
            raise RequestCancelled(
                f"loading was cancelled, because no request waits for the model {slot.name!r} any more"
            )

    return progress


def _found(slot: Slot, done: asyncio.Future[Needs]) -> None:
    if slot.finding is done:
        slot.finding = None
    if not done.cancelled():
        done.exception()  # marks the error as read; the load reports it, if it was not cancelled


def _config(slot: Slot) -> ModelConfig:
    assert slot.config is not None
    return slot.config


def _close(model: LoadedModel) -> None:
    try:
        model.close()
    except Exception:
        _log.exception("closing the model %s failed", model.name)


def _again(failure: ModelUnavailable) -> ModelUnavailable:
    """Return a copy of the error for another client."""
    return ModelUnavailable(str(failure), failure.retry_after)


def _public(slot: Slot, error: Exception) -> str:
    """Return the error's text without local paths, because clients must not learn these paths."""
    if not isinstance(error, BridleError):
        return "an unexpected error; the server's log has more"
    message, model = str(error), _config(slot).model
    for where in (str(Path(model).expanduser().resolve()), model):
        message = message.replace(where, slot.name)
    return message
