"""Which models are served, and under which names.

Every front-end resolves the name in a request here, so that an unknown one gives the same error everywhere.
It does not know how a model was loaded, and it never loads one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bridle.errors import InvalidRequest, UnknownModel
from bridle.service.loading import LoadedModel

_MAX_SHOWN_CHARS = 100


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

    @property
    def is_healthy(self) -> bool:
        """Whether something is served and every engine runs."""
        return bool(self._models) and all(model.client.is_healthy for model in self)

    def close(self, drain: float = 0.0) -> None:
        """Close every model; running requests get `drain` seconds. Idempotent."""
        for model in self:
            model.close(drain)
