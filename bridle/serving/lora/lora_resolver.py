"""Finds the adapter that a request names, loads it if this is allowed, and waits for it. All front ends use this
module.

    chosen = registry.choose(body.model, body.adapter)
    with await registry.acquire(chosen.model) as model:
        adapter = await registry.adapters.fetch(model, chosen.adapter)

All requests for one adapter share a single load. If the load fails, its error is kept for a while and answers further
requests. After the files have changed, the next request tries again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.errors import AdapterRefused, BridleError, InvalidRequest, ModelUnavailable, UnknownAdapter
from bridle.lora.negative_cache import FAILURE_SECONDS, CachedFailure, Failures, stamp_of
from bridle.safe_repr import short_repr
from bridle.serving.lora.lora_config import AdapterCatalog, AdapterSpec

if TYPE_CHECKING:
    from bridle.serving.lora.adapter_registry import AdapterInfo
    from bridle.serving.models.loading import LoadedModel

#: Maximum number of adapters that are inspected at once, because each may be large.
_MAX_LOOKS = 2

Load = asyncio.Task["AdapterInfo"]


class LoRAResolver:
    """Resolves adapters for one registry of models, in the registry's event loop. `catalog` says which adapters may be
    loaded. `names_of` returns the names that mean a model without an adapter. `is_taken` returns whether a name belongs
    to any model of the server. `clock` measures how long ago a load failed."""

    def __init__(
        self,
        catalog: AdapterCatalog,
        names_of: Callable[[LoadedModel], list[str]],
        is_taken: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.catalog = catalog
        self._names_of = names_of
        self._is_taken = is_taken
        self.clock = clock
        self._loads: dict[tuple[str, str], Load] = {}
        self._failures = Failures()
        self._looks = asyncio.Semaphore(_MAX_LOOKS)

    def is_ready(self, model: LoadedModel, name: str | None) -> bool:
        """Return whether `fetch` would return without waiting. Raises `UnknownAdapter`."""
        if not self._is_adapter(model, name):
            return True
        assert name is not None
        if name in model.adapters:
            return model.adapters.is_in_memory(name)
        if (model.name, name) not in self._loads and self.failure_of(model.name, name) is None:
            self._loadable(model, name)
        return False

    async def fetch(self, model: LoadedModel, name: str | None, timeout: float | None = None) -> str | None:
        """Return the name of the adapter that a request chooses, after it is in memory. For None, the empty name and
        the names of the model itself, the model is used without an adapter, and the result is None.

        An adapter that is in the catalog but not loaded is loaded. Raises `UnknownAdapter`, `AdapterRefused` for an
        unusable adapter, and `ModelUnavailable` after `timeout` seconds. Cancelling the caller ends the wait, but not
        the load of the adapter.
        """
        if not self._is_adapter(model, name):
            return None
        assert name is not None
        if not self.is_ready(model, name):
            try:
                async with asyncio.timeout(timeout):
                    await self._wait(model, name)
            except AdapterRefused as error:  # each waiter gets an error object of its own
                raise AdapterRefused(str(error), "adapter") from None
            except TimeoutError:
                raise ModelUnavailable(
                    f"the adapter {short_repr(name)} is not loaded after {timeout:g} s; try again later"
                ) from None
        return name

    async def load(
        self, model: LoadedModel, name: str, source: str, revision: str | None = None, *, replaces: bool = False
    ) -> AdapterInfo:
        """Load the adapter that the catalog has as `source`, under the name `name`. With `replaces`, the loaded adapter
        replaces an adapter of this name. Requests that have begun keep the replaced adapter. Raises `InvalidRequest`
        for a name that is in use, and `AdapterRefused` for an adapter that may not be loaded or is unusable."""
        spec = self.catalog.find(source, revision)
        if spec is None:
            at = "" if revision is None else f" at revision {short_repr(revision)}"
            raise AdapterRefused(
                f"the server may not load adapters from {short_repr(source)}{at}: the source must be a folder in "
                "adapters_dir, or one of the hub ids of allow_adapter",
                "source",
            )
        is_known = name in model.adapters
        if (is_known and not replaces) or (model.name, name) in self._loads:
            raise InvalidRequest(
                f"an adapter named {short_repr(name)} exists already; remove it first, or replace it", "name"
            )
        if not is_known and self._is_taken(name):
            raise InvalidRequest(
                f"a model has the name {short_repr(name)}; choose another name for the adapter", "name"
            )
        if is_known:
            return await self._replace(model, name, spec)
        return await asyncio.shield(self._begin(model, name, spec.source, spec.revision))

    async def _replace(self, model: LoadedModel, name: str, spec: AdapterSpec) -> AdapterInfo:
        try:
            async with self._looks:
                return await asyncio.to_thread(model.adapters.replace, name, spec.source, spec.revision)
        except AdapterRefused as error:
            raise _public(error, name, spec.source) from None

    def failure_of(self, model: str, name: str) -> BridleError | None:
        """Return the error of an earlier failed load, if another attempt now would fail again; otherwise None."""
        failure = self._failures.find((model, name), self.clock())
        return None if failure is None else failure.again()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _is_adapter(self, model: LoadedModel, name: str | None) -> bool:
        """Return whether a name means an adapter and not the model itself."""
        if not name:
            return False
        return name in model.adapters or not (model.adapters.is_base(name) or name in self._names_of(model))

    async def _wait(self, model: LoadedModel, name: str) -> None:
        load = self._loads.get((model.name, name))
        if load is None and name in model.adapters:
            source = model.adapters.get(name).source
            try:
                await model.adapters.ready(name)
            except AdapterRefused as error:
                raise _public(error, name, source) from None
            return
        if load is None:
            failure = self.failure_of(model.name, name)
            if failure is not None:
                raise failure
            spec = self._loadable(model, name)
            load = self._begin(model, name, spec.source, spec.revision, is_asked_for=True)
        await asyncio.shield(load)

    def _loadable(self, model: LoadedModel, name: str) -> AdapterSpec:
        """Return the catalog's entry for a name. Raises `UnknownAdapter` if the catalog has no entry with this name."""
        spec = self.catalog.find(name)
        if spec is None or self._is_taken(name):
            model.adapters.get(name)  # raises an error that lists the known names
            raise UnknownAdapter(f"there is no adapter {short_repr(name)}", "adapter")
        return spec

    def _begin(
        self, model: LoadedModel, name: str, source: str, revision: str | None, is_asked_for: bool = False
    ) -> Load:
        """Begin to load an adapter. If a request asked for it (`is_asked_for`), the error of a failed load is
        remembered."""
        task = asyncio.create_task(self._load(model, name, source, revision, is_asked_for), name=f"load adapter {name}")
        self._loads[model.name, name] = task
        task.add_done_callback(lambda done: self._end(model.name, name, done))
        return task

    async def _load(
        self, model: LoadedModel, name: str, source: str, revision: str | None, is_asked_for: bool
    ) -> AdapterInfo:
        folder = Path(source) if Path(source).is_absolute() else None  # None: on the hub
        stamp = stamp_of(folder)
        try:
            async with self._looks:
                await asyncio.to_thread(model.adapters.add, name, source, revision)
            info = await self._read(model, name)
        except (AdapterRefused, ModelUnavailable) as error:
            told = _public(error, name, source) if isinstance(error, AdapterRefused) else error
            failure = CachedFailure(told, folder, stamp, self.clock() + FAILURE_SECONDS)
            if is_asked_for:
                self._failures.note((model.name, name), failure)
            raise failure.again() from None
        self._failures.forget((model.name, name))
        return info

    async def _read(self, model: LoadedModel, name: str) -> AdapterInfo:
        """Read the weights of a new adapter. If the adapter is unusable, it is removed again."""
        try:
            return await model.adapters.ready(name)
        except BridleError:
            model.adapters.remove(name)
            raise

    def _end(self, model: str, name: str, task: Load) -> None:
        del self._loads[model, name]
        if not task.cancelled():
            task.exception()  # marks the error as read; the waiting requests report it, if there are any


def _public(error: AdapterRefused, name: str, source: str) -> AdapterRefused:
    """Return the error without local paths, because clients must not learn such paths."""
    return AdapterRefused(str(error).replace(str(Path(source).expanduser()), name), error.param)
