"""The models of a server as its operator configures them, and the registry that is built from them.

The operator names models, adds aliases, and says which other models may be loaded on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.config import EngineConfig, ModelConfig
from bridle.errors import BridleError, InvalidRequest
from bridle.load_progress import Report
from bridle.safe_repr import short_repr
from bridle.serving.controller_runtime import ControlSettings
from bridle.serving.lora.adapter_registry import PLACEHOLDERS
from bridle.serving.lora.lora_config import AdapterCatalog, AdapterSet, AdapterSpec
from bridle.serving.models.catalog import ModelCatalog
from bridle.serving.models.early_parts import EarlyParts, begin_parts
from bridle.serving.models.engine_factory import ExecutorLoader
from bridle.serving.models.loading import load_model, model_name
from bridle.serving.models.model_folders import is_hub_name
from bridle.serving.models.model_loader import ModelLoader, ModelManager
from bridle.serving.models.model_memory import Needs
from bridle.serving.models.model_registry import ModelRegistry
from bridle.serving.models.model_slot import Slot

if TYPE_CHECKING:
    from bridle.controller_tools import ToolExecutor
    from bridle.serving.models.loading import LoadedModel

#: A name on the command line that loads no model at the start: models are loaded when requests name them.
AUTO = "auto"
#: The share of the free memory that models may take if no limit is set.
_MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class ModelSet:
    """Models of a server. `models` are loaded at the start: folders, hub ids, `demo`, or `auto` for none.

    `aliases` map further names to a model of this set, or to a model that is loaded on demand. Other models are loaded
    on demand: folders under `models_dir`, the hub ids in `allow_hub`, and with `allow_pull` pulled models. With
    `is_static`, no model is loaded or unloaded after the start. `max_memory` limits the memory of all models together,
    in bytes (None: most of the free memory).
    """

    models: tuple[str, ...] = ("demo",)
    aliases: tuple[tuple[str, str], ...] = ()
    models_dir: Path | None = None
    allow_hub: tuple[str, ...] = ()
    allow_pull: bool = False
    is_static: bool = False
    max_memory: int | None = None

    def __post_init__(self) -> None:
        if self.is_static and AUTO in self.models:
            raise InvalidRequest("static cannot be combined with the model auto: name a model", "static")
        if self.is_static and (self.models_dir is not None or self.allow_hub or self.allow_pull):
            raise InvalidRequest(
                "static serves only the models of the command line; leave models_dir, allow_hub and allow_pull out",
                "static",
            )
        if self.max_memory is not None and self.max_memory < 1:
            raise InvalidRequest(f"max_model_memory is {self.max_memory}; must be at least 1", "max_model_memory")
        if not self.named and not (self.aliases or self.models_dir or self.allow_hub or self.allow_pull):
            raise InvalidRequest(
                "the model auto loads models that requests name, but no model may be loaded: give models_dir, "
                "allow_hub, allow_pull or a model_alias",
                "model",
            )

    @property
    def may_be_several(self) -> bool:
        """Return whether more than one model can be loaded at a time."""
        return len(self.named) != 1 or self.is_open

    @property
    def is_open(self) -> bool:
        """Return whether models other than the named ones may be loaded."""
        return not self.is_static and bool(self.aliases or self.models_dir or self.allow_hub or self.allow_pull)

    @property
    def named(self) -> tuple[str, ...]:
        """Return the models that are loaded at the start."""
        return tuple(model for model in self.models if model != AUTO)


class EngineLoader:
    """Loads models into this process, or with `executors` into other processes. Each model gets a separate engine,
    tokenizer and control runtime; all models share `tools`."""

    def __init__(
        self,
        engine: EngineConfig | None = None,
        control: ControlSettings | None = None,
        executors: ExecutorLoader | None = None,
        tools: ToolExecutor | None = None,
    ) -> None:
        self._engine = engine
        self._control = control
        self._executors = executors
        self._tools = tools
        self._early: EarlyParts | None = None
        self._is_first = True

    def measure(self, config: ModelConfig, name: str) -> Needs:
        self._begin(config)
        try:
            from bridle.model.memory_estimate import weights_of

            return Needs(weights_of(config), config.reserved_memory or 0)
        except BaseException:
            self._take(None)
            raise

    def _begin(self, config: ModelConfig) -> None:
        """Begin to prepare the parts of the first model, before the libraries are imported."""
        from bridle.backends import check_backend

        check_backend(config)
        if self._is_first:
            self._is_first = False
            self._early = begin_parts(config, self._control or ControlSettings("off"))

    def _take(self, config: ModelConfig | None) -> EarlyParts | None:
        """Return the parts that were prepared for `config`. Parts that were prepared for another configuration are
        ended."""
        early, self._early = self._early, None
        if early is None or (config is not None and early.fits(config)):
            return early
        early.abandon()
        return None

    def make_room(self, config: ModelConfig) -> ModelConfig:
        self._begin(config)
        from bridle.model.memory_estimate import settle_adapters

        config, self._engine = settle_adapters(config, self._engine or EngineConfig())
        return config

    def load(self, config: ModelConfig, name: str, progress: Report) -> LoadedModel:
        return load_model(
            config,
            self._engine,
            name=name,
            progress=progress,
            control=self._control,
            executors=self._executors,
            tools=self._tools,
            early=self._take(config),
        )


class AdapterLoader:
    """A loader that also adds the adapters in a catalog to their models, and waits until these adapters are read.
    Models that may have adapters reserve memory for them, in addition to their KV cache."""

    def __init__(self, loader: ModelLoader, catalog: AdapterCatalog) -> None:
        self._loader = loader
        self._catalog = catalog

    def measure(self, config: ModelConfig, name: str) -> Needs:
        return self._loader.measure(self._roomy(config, name), name)

    def make_room(self, config: ModelConfig) -> ModelConfig:
        return self._loader.make_room(config)

    def load(self, config: ModelConfig, name: str, progress: Report) -> LoadedModel:
        model = self._loader.load(self._roomy(config, name), name, progress)
        try:
            add_adapters(model, self._catalog.named_for(name))
        except BaseException:
            model.close()
            raise
        return model

    def _roomy(self, config: ModelConfig, name: str) -> ModelConfig:
        return self._loader.make_room(config) if self._catalog.serves(name) else config


def add_adapters(model: LoadedModel, adapters: Iterable[AdapterSpec]) -> None:
    """Add adapters to a model, and wait until each adapter is read. The call blocks and needs no event loop. Raises the
    error of the first unusable adapter, which is not added."""
    for spec in adapters:
        model.adapters.add(spec.name, spec.source, spec.revision)
        try:
            model.adapters.fetch(spec.name).result()
        except BridleError:
            model.adapters.remove(spec.name)
            raise


def build_registry(
    models: ModelSet,
    base: ModelConfig,
    loader: ModelLoader,
    name: str | None = None,
    adapters: AdapterSet | None = None,
) -> tuple[ModelRegistry, Callable[..., None]]:
    """Build the registry of a model set, without loading the models. The second result is a function that loads the
    named models into the registry. The function blocks, and takes a `Show` for the progress.

    `base` has the settings for loading. The revision and the tokenizer in `base` are used only if there is a single
    model. `name` is the name of a single model. Raises `InvalidRequest` for settings that contradict each other.
    """
    _check_single(models, base, name)
    if models.is_static and adapters is not None and adapters.is_open:
        raise InvalidRequest(
            "static serves only the models and adapters of the command line; leave adapters_dir and allow_adapter out",
            "static",
        )
    vectors, base = base.control_vectors, replace(base, control_vectors=())
    catalog = ModelCatalog(base, models_dir=models.models_dir, hub_ids=models.allow_hub, pulled=models.allow_pull)
    known_adapters = AdapterCatalog(adapters)
    keeper = ModelManager(AdapterLoader(loader, known_adapters), _bound(models, base))
    registry = ModelRegistry(catalog=catalog, keeper=keeper, adapters=known_adapters)
    slots = [
        Slot(name or model_name(model), replace(base, model=model), is_pinned=models.is_static)
        for model in models.named
    ]
    for slot in slots:
        registry.add_slot(slot)
    _add_aliases(registry, catalog, models, base)
    _assign_vectors(registry, slots, vectors)
    known_adapters.assign(slots[0].name if slots else None, lambda model: registry.slot_of(model).name)
    _check_adapters(registry)
    return registry, partial(keeper.fill, slots, models.is_open)


def _assign_vectors(registry: ModelRegistry, slots: Sequence[Slot], vectors: Sequence[str]) -> None:
    """Assign control vectors, each as [MODEL:]NAME=FILE, to the models that they name, or else to the first model. With
    a single model, a colon may be part of the name of a vector. Raises `InvalidRequest` for a model that is not
    served."""
    for each in vectors:
        model, colon, name = each.partition("=")[0].partition(":")
        slot, is_named = slots[0], bool(colon) and model in registry.names
        if is_named:
            slot, each = registry.slot_of(model), each.partition(":")[2]
        elif colon and len(slots) > 1:
            raise InvalidRequest(
                f"control_vectors: got {short_repr(each)}; {short_repr(model)} is not a model of this server. Write "
                f"MODEL:{name}=FILE with one of {', '.join(registry.names)}.",
                "control_vectors",
            )
        assert slot.config is not None
        slot.config = replace(slot.config, control_vectors=(*slot.config.control_vectors, each))


def _check_adapters(registry: ModelRegistry) -> None:
    """Raise `InvalidRequest` for an adapter that has the same name as a model."""
    for slot in registry.slots:
        clashes = set(registry.adapter_names(slot)) & {*registry.names, *PLACEHOLDERS}
        if clashes:
            raise InvalidRequest(
                f"an adapter has the name {min(clashes)!r}, which is the name of a model; rename the adapter", "adapter"
            )


def _check_single(models: ModelSet, base: ModelConfig, name: str | None) -> None:
    if len(models.named) == 1:
        return
    single = {"served_name": name, "revision": base.revision, "tokenizer": base.tokenizer, "mmproj": base.mmproj}
    if not models.named:
        single["control_vectors"] = ", ".join(base.control_vectors) or None
    for param, value in single.items():
        if value is not None:
            raise InvalidRequest(
                f"{param} is {value!r}; this setting applies to one model, but {len(models.named)} models are given. "
                "Use model_alias to name one of them",
                param,
            )


def _bound(models: ModelSet, base: ModelConfig) -> int | None:
    if models.max_memory is not None:
        return models.max_memory
    if not models.may_be_several:
        return None  # one model needs no limit: it takes its share of the free memory
    from bridle.model.memory_estimate import free_on

    return int(_MEMORY_SHARE * free_on(base))


def _add_aliases(registry: ModelRegistry, catalog: ModelCatalog, models: ModelSet, base: ModelConfig) -> None:
    """Add the aliases. Each alias of a model set is a further name of a model, or becomes the name of a loadable
    model."""
    known = {model: slot.name for model, slot in zip(models.named, registry.slots, strict=True)}
    known |= {slot.name: slot.name for slot in registry.slots}
    for alias, model in models.aliases:
        name = known.get(model)
        if name is None and catalog.find(model) is not None:
            name = model
        if name is not None:
            registry.add_alias(alias, name)
            continue
        _check_target(alias, model, models)
        registry.add_slot(Slot(alias, replace(base, model=model, revision=None, tokenizer=None, mmproj=None)))
        known[model] = alias


def _check_target(alias: str, model: str, models: ModelSet) -> None:
    if models.is_static:
        raise InvalidRequest(
            f"model_alias {alias}={model}: {model!r} is not one of the models, and with static no other model is "
            "loaded",
            "model_alias",
        )
    path = Path(model).expanduser()
    is_file = path.suffix.lower() == ".gguf" and path.is_file()
    if not alias or not (path.is_dir() or is_file or is_hub_name(model.partition(":")[0])):
        text = f"model_alias {alias}={model}: {model!r} is neither a folder, a GGUF file nor a hub id"
        raise InvalidRequest(text, "model_alias")
