"""Adapters that a server was told of: those it loads at the start, and what may be loaded later.

The operator names them as `[MODEL:]NAME=SOURCE[@REVISION]`, where a source is a folder or a hub id. Beside those, a
name from the network can only mean a folder under the adapters' folder, or a hub id that was allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridle.errors import InvalidRequest
from bridle.lora.files import CONFIG_NAME
from bridle.lora.hub import is_hub_id
from bridle.service.folders import NamedFolders, is_hub_name

_FORM = "must be [MODEL:]NAME=SOURCE[@REVISION], a source being a folder or a hub id"


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter and where it comes from: a folder, or a hub id at a revision. `model` is whose it is, None for the
    first model's."""

    name: str
    source: str
    revision: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """`named` are loaded with their models. Folders under `folder`, and the `hub_ids` (`owner/name`, or
    `owner/name@rev` for that revision alone), may be loaded later by their names."""

    named: tuple[AdapterSpec, ...] = ()
    folder: Path | None = None
    hub_ids: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether more may be loaded than what is named."""
        return self.folder is not None or bool(self.hub_ids)


class AdapterCatalog:
    """What of an `AdapterSet` may be loaded when somebody names it, beside the adapters that have names."""

    def __init__(self, adapters: AdapterSet | None = None) -> None:
        adapters = adapters or AdapterSet()
        self._named: dict[str, list[AdapterSpec]] = {}  # by model
        self._given = adapters.named
        self._is_open = adapters.is_open
        self._folders = None if adapters.folder is None else NamedFolders(adapters.folder, CONFIG_NAME, "adapters_dir")
        self._hub_ids = dict(_allowed(text) for text in adapters.hub_ids)

    def named_for(self, model: str) -> Sequence[AdapterSpec]:
        """The adapters that come with a model."""
        return self._named.get(model, ())

    def serves(self, model: str) -> bool:
        """Whether a model may ever have adapters."""
        return self._is_open or model in self._named

    def assign(self, default: str | None, canonical: Callable[[str], str]) -> None:
        """Say whose the named adapters are: `default` is the first model, `canonical` gives the name that a model has.
        Raises `InvalidRequest` where there is no such model."""
        for spec in self._given:
            if spec.model is None and default is None:
                raise InvalidRequest(
                    f"adapter {spec.name}: there is no first model whose it could be; say MODEL:{spec.name}=...",
                    "adapter",
                )
            model = canonical(spec.model) if spec.model is not None else default
            assert model is not None
            self._named.setdefault(model, []).append(spec)

    def find(self, source: str, revision: str | None = None) -> AdapterSpec | None:
        """What `source` means: a folder under the adapters' folder, by its name or its full path, or a hub id that was
        allowed, at that revision; None if it may not be loaded, or is not there."""
        name, at, inline = source.partition("@")
        revision = inline if at and revision is None else revision
        if self._folders is not None and revision is None:
            name = self._folders.name_of(source)
            folder = self._folders.find(name)
            if folder is not None:
                return AdapterSpec(name, str(folder))
        if name not in self._hub_ids:
            return None
        pinned = self._hub_ids[name]
        if revision is not None and (not is_revision(revision) or pinned not in (None, revision)):
            return None
        return AdapterSpec(name, name, pinned or revision)

    def names(self) -> list[str]:
        """Every name that can be loaded. Looks at the disk."""
        found = [] if self._folders is None else self._folders.names()
        return list(dict.fromkeys((*found, *self._hub_ids)))


def parse_adapter(text: str) -> AdapterSpec:
    """What `text` names. Without `NAME=` the name is that of the folder or hub id. Raises `InvalidRequest`."""
    model, name, source = _split(text.strip())
    if not source or name == "":
        raise InvalidRequest(f"adapter is {text!r}; {_FORM}", "adapter")
    folder = Path(source).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        return AdapterSpec(name or folder.name, str(folder), None, model)
    hub_id, at, revision = source.partition("@")
    if not is_hub_id(hub_id) or (at and not is_revision(revision)):
        raise InvalidRequest(f"adapter is {text!r}: {source!r} is neither a folder nor a hub id; {_FORM}", "adapter")
    return AdapterSpec(name or hub_id, hub_id, revision or None, model)


def _split(text: str) -> tuple[str | None, str | None, str]:
    """Model, name and source."""
    told, equals, source = text.partition("=")
    if not equals or Path(text).expanduser().is_dir():  # the name of a folder may hold anything
        return None, None, text
    model, _, name = told.rpartition(":")
    return model.strip() or None, name.strip(), source.strip()


def parse_adapters(texts: Iterable[str]) -> tuple[AdapterSpec, ...]:
    """Several of them. Raises `InvalidRequest` if two have one name."""
    specs = tuple(parse_adapter(text) for text in texts)
    seen: set[tuple[str | None, str]] = set()
    for spec in specs:
        if (spec.model, spec.name) in seen:
            raise InvalidRequest(f"two adapters are called {spec.name!r}; give one another name", "adapter")
        seen.add((spec.model, spec.name))
    return specs


def is_revision(text: str) -> bool:
    """Whether it looks like a branch, a tag or a commit."""
    return 0 < len(text) <= 100 and ".." not in text and all(part and is_hub_name(part) for part in text.split("/"))


def _allowed(text: str) -> tuple[str, str | None]:
    """An allowed hub id, and the one revision that is meant, if any."""
    name, at, revision = text.partition("@")
    if not is_hub_id(name) or (at and not is_revision(revision)):
        raise InvalidRequest(
            f"allow_adapter is {text!r}; must be a hub id such as 'owner/name' or 'owner/name@revision'",
            "allow_adapter",
        )
    return name, revision or None
