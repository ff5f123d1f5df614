"""Registry of the served models and their names.

Every front end resolves the name in a request here. So an unknown name gives the same error everywhere:

    chosen = registry.choose(name, adapter)
    with await registry.acquire(chosen.model, timeout=60) as model:
        adapter = await registry.adapters.fetch(model, chosen.adapter, timeout=60)
        ...  # submit to model.client and read the stream to its end

A front end that reports waiting to its client calls `state_of(name)` first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from bridle.errors import BridleError, InvalidRequest, ModelUnavailable, UnknownModel, UnsupportedFeature
from bridle.safe_repr import short_repr
from bridle.serving.lora.adapter_registry import PLACEHOLDERS, is_address
from bridle.serving.lora.lora_config import AdapterCatalog
from bridle.serving.lora.lora_resolver import LoRAResolver
from bridle.serving.models.catalog import ModelCatalog
from bridle.serving.models.engine_supervisor import EngineSupervisor, RestartPolicy
from bridle.serving.models.keep_alive import KeepAlive
from bridle.serving.models.loading import LoadedModel
from bridle.serving.models.model_loader import ModelManager
from bridle.serving.models.model_slot import Lease, ModelState, Slot

_MAX_SHOWN_CHARS = 100
_PATHS = ("/", ".", "~")
_MAX_SHOWN_NAMES = 40


class ModelChoice(NamedTuple):
    """The names of the model and the adapter that a request chooses."""

    model: str | None
    adapter: str | None


class ModelRegistry:
    """The models of a server by name: loaded models, and models that may be loaded. The model that is added first is
    the default.

    Without a `catalog` and a `keeper`, only the models that were added are served, and they stay loaded. A catalog has
    the models that may be loaded when a request names them, and the keeper loads them. `adapters` resolves and loads
    adapters in the same way. Use a registry in only one thread or event loop.
    """

    def __init__(
        self,
        models: Iterable[LoadedModel] = (),
        *,
        catalog: ModelCatalog | None = None,
        keeper: ModelManager | None = None,
        adapters: AdapterCatalog | None = None,
    ) -> None:
        self._slots: dict[str, Slot] = {}
        self._aliases: dict[str, str] = {}
        self._catalog = catalog or ModelCatalog()
        self._keeper = keeper
        self._supervisor: EngineSupervisor | None = None
        self.keep_alive = KeepAlive(self._expire)
        self.adapters = LoRAResolver(adapters or AdapterCatalog(), self.aliases_of, self._is_model)
        for model in models:
            self.add(model)

    def __iter__(self) -> Iterator[LoadedModel]:
        """Iterate over the loaded models."""
        return iter([slot.model for slot in self._slots.values() if slot.model is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    # -- what is served ------------------------------------------------------------------------------------------

    def add(self, model: LoadedModel, aliases: Iterable[str] = ()) -> None:
        """Serve a loaded model permanently, under its own name and its `aliases`. A name can be used for only one
        model."""
        slot = Slot(model.name, model=model, is_pinned=True)
        self.add_slot(slot, aliases)
        if self._keeper is not None:
            self._keeper.keep(slot)

    def add_slot(self, slot: Slot, aliases: Iterable[str] = ()) -> None:
        """Serve the model of a slot, whether loaded or loadable, under its name and `aliases`."""
        names = [slot.name, *(alias for alias in dict.fromkeys(aliases) if alias != slot.name)]
        for name in names:
            self._check_free(name)
        self._slots[slot.name] = slot
        self._aliases.update(dict.fromkeys(names[1:], slot.name))

    def add_alias(self, alias: str, name: str) -> None:
        """Make `alias` a further name of the model that `name` means. `name` may be a name in the catalog."""
        self._check_free(alias)
        self._aliases[alias] = self._aliases.get(name, name)

    @property
    def slots(self) -> list[Slot]:
        """Return the slots of all added names, in the order in which they were added. An alias has no slot of its own.
        The slots must not be modified."""
        return list(self._slots.values())

    @property
    def default(self) -> LoadedModel:
        """Return the loaded model for requests that name no model. Raises `UnknownModel` while no model is served."""
        return self.resolve(None)

    def longest_prompt(self) -> int:
        """Return the highest number of prompt tokens that any loaded model allows; 0 if no model is loaded."""
        return max((model.max_sequence_tokens for model in self), default=0)

    @property
    def names(self) -> list[str]:
        """Return all names that were added, and the names of loadable models that are loaded. The names of models come
        before aliases. An alias that is a path (LMQL uses such aliases) works but is not listed."""
        known = [name for name, slot in self._slots.items() if slot.model is not None or not slot.is_passing]
        return [*known, *(alias for alias in self._aliases if not alias.startswith(_PATHS))]

    @property
    def loadable_names(self) -> list[str]:
        """Return all names in the catalog. Reads the disk."""
        return self._catalog.names()

    @property
    def may_pull(self) -> bool:
        """Return whether clients may pull models, and load models that `bridle pull` lists by their names."""
        return self._keeper is not None and self._catalog.may_pull

    async def all_names(self) -> list[str]:
        """Return all names that a request may use now, including names of loadable models. Reads the disk."""
        return list(dict.fromkeys([*self.names, *await asyncio.to_thread(self._catalog.names)]))

    async def all_adapters(self) -> list[tuple[str, str]]:
        """Return all adapters that a request may choose now, as (model, adapter), including loadable adapters. Reads
        the disk."""
        loadable = await asyncio.to_thread(self.adapters.catalog.names)
        models = {*self._slots, *self._aliases, *await asyncio.to_thread(self._catalog.names)}
        known = [(slot.name, name) for slot in self._slots.values() for name in self.adapter_names(slot)]
        taken = {name for _, name in known}
        default = next((slot.name for slot in self._slots.values() if not slot.is_passing), None)
        if default is None:
            return known
        return [*known, *((default, name) for name in loadable if name not in taken and name not in models)]

    def aliases_of(self, model: LoadedModel) -> list[str]:
        """Return the aliases of `model`."""
        return [alias for alias, name in self._aliases.items() if name == model.name]

    def slot_of(self, name: str | None) -> Slot:
        """Return the slot for a name or alias; the slot must not be modified. None, the empty name and `PLACEHOLDERS`
        mean the default model. If there is only one model and only pulled models are loadable, an address also means
        the default model. Raises `UnknownModel`."""
        name = name or ""
        canonical = self._aliases.get(name, name)
        slot = self._slots.get(canonical)
        if slot is None and (not name or name in PLACEHOLDERS or (self._is_single and is_address(name))):
            return self._default_slot()
        if slot is not None and not (slot.is_passing and slot.is_vacant):
            return slot
        config = None if self._keeper is None else self._catalog.find(canonical)
        if config is None:
            raise self._unknown(name)
        return Slot(canonical, config, is_passing=True)

    def choose(self, name: str | None, adapter: str | None = None, *, must_name: bool = False) -> ModelChoice:
        """Return the model and the adapter for a request that names a model, an adapter, or both. A name that no model
        has can be the name of an adapter, and then means the first model with this adapter. A name can also have the
        form `MODEL:ADAPTER`. If the server has several models, a request with `must_name` must name a model or an
        adapter. Raises `UnknownModel` and `InvalidRequest`. The existence of the adapter is checked after the model is
        loaded."""
        if must_name and name is None and not adapter:
            names = [slot.name for slot in self._slots.values() if not slot.is_passing]
            if len(names) > 1:
                shown_names = ", ".join(names[:_MAX_SHOWN_NAMES])
                raise InvalidRequest(f"model is missing; choose one of this server's models: {shown_names}", "model")
        try:
            self.slot_of(name)
        except UnknownModel:
            chosen = self._choose_adapter(name or "")
            if chosen is None or adapter not in (None, "", name, chosen.adapter):
                raise
            return chosen
        return ModelChoice(name, adapter)

    def adapter_names(self, slot: Slot) -> list[str]:
        """Return the names of a model's adapters. If the model is not loaded, the adapters that are loaded together
        with it are returned."""
        if slot.model is not None:
            return [info.name for info in slot.model.adapters.list()]
        return [spec.name for spec in self.adapters.catalog.named_for(slot.name)]

    def state_of(self, name: str | None) -> ModelState:
        """Return the state of the model with this name. Raises `UnknownModel`."""
        return self.slot_of(name).state

    def resolve(self, name: str | None) -> LoadedModel:
        """Return the loaded model with this name or alias, without a lease. Raises `UnknownModel`, and
        `ModelUnavailable` for a model that is not loaded."""
        slot = self.slot_of(name)
        if slot.model is None:
            raise ModelUnavailable(f"the model {slot.name!r} is not loaded; its state is {slot.state}")
        return slot.model

    @property
    def is_healthy(self) -> bool:
        """Return whether at least one model is served or can be loaded, and all engines run."""
        can_serve = bool(self._slots) or not self._catalog.is_empty
        return can_serve and not self.restarting and all(model.client.is_healthy for model in self)

    @property
    def restarting(self) -> list[str]:
        """Return the models whose engines have failed and are being restarted."""
        return [slot.name for slot in self._slots.values() if slot.is_restarting]

    @property
    def given_up(self) -> list[str]:
        """Return the models whose engines failed too often and are no longer restarted."""
        return [slot.name for slot in self._slots.values() if slot.is_given_up]

    def supervisor(self, policy: RestartPolicy, give_up: Callable[[BridleError], None]) -> EngineSupervisor:
        """Return the supervisor, which restarts failed engines of this registry while it runs. `give_up` is called if
        restarts fail too often."""
        self._supervisor = EngineSupervisor(self._slots.values, self._keeper, policy, give_up)
        return self._supervisor

    # -- use -----------------------------------------------------------------------------------------------------

    async def hold(self, slot: Slot, held: ExitStack, timeout: float | None = None) -> LoadedModel:
        """Return the model of a slot that `slot_of` returned. The model stays loaded until `held` is closed. If the
        model is not loaded, the call waits at most `timeout` seconds for it; other requests continue meanwhile.

        Raises `ModelUnavailable` if the model cannot be loaded now: loading failed, takes too long, or has no room next
        to the models in use. Cancelling the caller ends the wait for the model. This method must be called in the
        registry's event loop.
        """
        if self._supervisor is not None:
            self._supervisor.restart_failed(slot)  # the engine may have failed since the last check
        if slot.model is None:
            assert self._keeper is not None  # without a keeper, every slot has a model
            self._slots[slot.name] = slot
            await self._keeper.fetch(slot, timeout)
        assert slot.model is not None
        if slot.keep_seconds is not None:  # a client has limited how long the model stays
            self.keep_alive.stop(slot)
        slot.num_leases += 1
        held.callback(self._release, slot)
        return slot.model

    async def acquire(self, name: str | None, timeout: float | None = None) -> Lease:
        """Lease the model with this name or alias (None or empty: the default) as `hold` does, until the lease is
        released. Raises `UnknownModel` at once for a name that is not served."""
        held = ExitStack()
        return Lease(await self.hold(self.slot_of(name), held, timeout), held.close)

    async def unload(self, name: str) -> None:
        """Close an idle model; a later request loads it again. Raises `UnknownModel`, `UnsupportedFeature` for a model
        that is served permanently, and `ModelUnavailable` for a model in use."""
        slot = self.slot_of(name)
        if slot.is_pinned or self._keeper is None:
            raise UnsupportedFeature(f"the model {slot.name!r} is served permanently and cannot be unloaded", "model")
        if slot.state is ModelState.LOADING or slot.num_leases or slot.num_waiting:
            uses = f"{slot.num_leases} requests use it" if slot.num_leases else "it is being loaded"
            raise ModelUnavailable(f"the model {slot.name!r} cannot be unloaded: {uses}")
        if slot.model is not None:
            self.keep_alive.stop(slot)
            await self._keeper.empty(slot)

    def close(self, drain: float = 0.0) -> None:
        """Close all models. Running requests get `drain` seconds to finish. Idempotent."""
        if self._keeper is not None:
            self._keeper.close(drain)
        for model in self:
            model.close(drain)

    async def _expire(self, slot: Slot) -> None:
        if self._keeper is not None and slot.is_idle:
            await self._keeper.empty(slot)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _check_free(self, name: str) -> None:
        if self._is_taken(name):
            raise InvalidRequest(f"the model name {name!r} is in use already; choose another name", "model")
        if any(name in self.adapter_names(slot) for slot in self._slots.values()):
            raise InvalidRequest(f"the model name {name!r} is the name of an adapter; choose another name", "model")

    def _is_taken(self, name: str) -> bool:
        return name in self._slots or name in self._aliases

    def _owner_of(self, adapter: str) -> str | None:
        """Return the first model with an adapter of this name. For an adapter that may be loaded later, return the
        default model."""
        for slot in self._slots.values():
            if slot.model is not None and adapter in slot.model.adapters:
                return slot.name
            if slot.model is None and adapter in self.adapter_names(slot):
                return slot.name
        return self._default_slot().name if self.adapters.catalog.find(adapter) is not None else None

    def _choose_adapter(self, name: str) -> ModelChoice | None:
        """Return the choice for a name that is not the name of a model: the name of an adapter, or `MODEL:ADAPTER`.
        Returns None for a name of neither form."""
        owner = self._owner_of(name)
        if owner is not None:
            return ModelChoice(owner, name)
        for end, char in enumerate(name[:_MAX_SHOWN_CHARS]):
            if char == ":" and name[end + 1 :] and self._is_model(name[:end]):
                return ModelChoice(name[:end], name[end + 1 :])
        return None

    def _is_model(self, name: str) -> bool:
        """Return whether a request with this name gets a model, which may be loaded or loadable."""
        return self._is_taken(name) or (self._keeper is not None and self._catalog.find(name) is not None)

    @property
    def _is_single(self) -> bool:
        return not self._catalog.has_own and sum(not slot.is_passing for slot in self._slots.values()) == 1

    def _default_slot(self) -> Slot:
        for slot in self._slots.values():
            if not slot.is_passing:
                return slot
        if self._catalog.is_empty:
            raise UnknownModel("this server has no models", "model")
        raise UnknownModel("this server has no default model; name one from /v1/models", "model")

    def _release(self, slot: Slot) -> None:
        slot.num_leases -= 1
        if self._keeper is not None:
            slot.last_used = self._keeper.now()
            self.keep_alive.start(slot)
            self._keeper.notice()

    def _unknown(self, name: str) -> UnknownModel:
        names = [*self.names, *(adapter for slot in self._slots.values() for adapter in self.adapter_names(slot))]
        served = ", ".join(repr(known) for known in names[:_MAX_SHOWN_NAMES]) or "nothing"
        more = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
        return UnknownModel(f"the model {short_repr(name)} is not served here; served: {served}{more}", "model")
