"""Which models are served, and under which names.

Every front-end resolves the name in a request here, so that an unknown one gives the same error everywhere:

    with await registry.acquire(name, timeout=60) as model:
        ...  # submit to model.client and read the stream to its end

A front-end that wants to tell its client about a wait looks at `state_of(name)` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from bridle.errors import InvalidRequest, UnknownModel
from bridle.service.lease import Lease
from bridle.service.loading import LoadedModel

_MAX_SHOWN_CHARS = 100


class ModelState(StrEnum):
    """What a known model is doing: it answers, it is on its way, or it would be loaded if somebody asked."""

    LOADED = "loaded"
    LOADING = "loading"
    LOADABLE = "loadable"


class ModelRegistry:
    """Loaded models by name. The first one added is the default. Used from one thread or event loop."""

    def __init__(self, models: Iterable[LoadedModel] = ()) -> None:
        self._models: dict[str, LoadedModel] = {}
        self._aliases: dict[str, str] = {}
        for model in models:
            self.add(model)

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(tuple(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    def add(self, model: LoadedModel, aliases: Iterable[str] = ()) -> None:
        """Serve `model` under its own name and `aliases`. A name can be taken only once."""
        names = [model.name, *(alias for alias in dict.fromkeys(aliases) if alias != model.name)]
        for name in names:
            if name in self._models or name in self._aliases:
                raise InvalidRequest(f"the model name {name!r} is taken already", "model")
        self._models[model.name] = model
        self._aliases.update(dict.fromkeys(names[1:], model.name))

    @property
    def default(self) -> LoadedModel:
        """The model of requests that name none. Raises `UnknownModel` while nothing is served."""
        for model in self._models.values():
            return model
        raise UnknownModel("no model is served here", "model")

    @property
    def names(self) -> list[str]:
        """Every name a request may use, models first."""
        return [*self._models, *self._aliases]

    def aliases_of(self, model: LoadedModel) -> list[str]:
        """Further names of `model`."""
        return [alias for alias, name in self._aliases.items() if name == model.name]

    def resolve(self, name: str | None) -> LoadedModel:
        """The model of that name or alias; None or the empty name mean the default."""
        if not name:
            return self.default
        model = self._models.get(self._aliases.get(name, name))
        if model is None:
            shown = name if len(name) <= _MAX_SHOWN_CHARS else name[:_MAX_SHOWN_CHARS] + "..."
            served = ", ".join(repr(known) for known in self.names) or "nothing"
            raise UnknownModel(f"the model {shown!r} is not served here; served: {served}", "model")
        return model

    def state_of(self, name: str | None) -> ModelState:
        """What the model of that name is doing. Raises `UnknownModel`."""
        self.resolve(name)
        return ModelState.LOADED

    async def acquire(self, name: str | None, timeout: float | None = None) -> Lease:
        """A hold on the model of that name or alias (None or empty: the default), which stays loaded until the lease
        is released. If it is not loaded yet, this waits until it is, at most `timeout` seconds; other requests go on.

        Raises `UnknownModel` at once for a name that is not served here, and `ModelUnavailable` for one that cannot be
        had now: loading failed, takes too long, or there is no room beside the models in use. Cancelling the caller
        ends the wait. Call it from the event loop that uses the registry.
        """
        return Lease(self.resolve(name))

    @property
    def is_healthy(self) -> bool:
        """Whether something is served and every engine runs."""
        return bool(self._models) and all(model.client.is_healthy for model in self)

    def close(self, drain: float = 0.0) -> None:
        """Close every model; running requests get `drain` seconds. Idempotent."""
        for model in self:
            model.close(drain)
