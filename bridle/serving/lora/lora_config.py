"""The adapters of a server, as its operator configures them: those that are loaded at the start, and those that may be
loaded later.

The operator names adapters as `[MODEL:]NAME=SOURCE[@REVISION]`. A source is a folder or a hub id. A name from a client
can mean only a named adapter, a folder under the adapters' folder, or an allowed hub id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridle.config import ModelConfig
from bridle.errors import InvalidRequest
from bridle.gguf.folder import is_adapter_file
from bridle.lora.files import CONFIG_NAME
from bridle.lora.hub import is_hub_id
from bridle.safe_repr import short_repr
from bridle.serving.models.model_folders import NamedFiles, NamedFolders, is_hub_name

_FORM = "must be [MODEL:]NAME=SOURCE[@REVISION], a source being a folder, a GGUF file or a hub id"


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter and its source, which is a folder or a hub id at a revision. `model` is the model to which the adapter
    belongs; None means the first model."""

    name: str
    source: str
    revision: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of a server. The adapters in `named` are loaded together with their models. Folders under `folder`
    and the `hub_ids` may be loaded later by their names. A hub id is `owner/name`, or `owner/name@rev` for only that
    revision."""

    named: tuple[AdapterSpec, ...] = ()
    folder: Path | None = None
    hub_ids: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Return whether adapters other than the named ones may be loaded later."""
        return self.folder is not None or bool(self.hub_ids)


class AdapterCatalog:
    """Looks up which adapters of an `AdapterSet` may be loaded when a request names them."""

    def __init__(self, adapters: AdapterSet | None = None) -> None:
        adapters = adapters or AdapterSet()
        self._named: dict[str, list[AdapterSpec]] = {}  # by model
        self._given = adapters.named
        self._is_open = adapters.is_open
        self._folders = None if adapters.folder is None else NamedFolders(adapters.folder, CONFIG_NAME, "adapters_dir")
        self._vectors = None if adapters.folder is None else NamedFiles(adapters.folder, "adapters_dir")
        self._hub_ids = dict(_allowed(text) for text in adapters.hub_ids)

    def named_for(self, model: str) -> Sequence[AdapterSpec]:
        """Return the adapters that are loaded together with this model."""
        return self._named.get(model, ())

    def serves(self, model: str) -> bool:
        """Return whether a model may ever have adapters."""
        return self._is_open or model in self._named

    def assign(self, default: str | None, canonical: Callable[[str], str]) -> None:
        """Assign each named adapter to its model. `default` is the first model. `canonical` returns the real name of a
        model for an alias. Raises `InvalidRequest` if the model of an adapter does not exist."""
        for spec in self._given:
            if spec.model is None and default is None:
                raise InvalidRequest(
                    f"adapter {spec.name}: the model is missing; write MODEL:{spec.name}=...", "adapter"
                )
            model = canonical(spec.model) if spec.model is not None else default
            assert model is not None
            self._named.setdefault(model, []).append(spec)

    def find(self, source: str, revision: str | None = None) -> AdapterSpec | None:
        """Return the adapter that `source` means. `source` is a folder under the adapters' folder (by name or full
        path), or an allowed hub id at that revision. The result is None if the adapter may not be loaded or does not
        exist."""
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

    def vector_file(self, source: str) -> Path:
        """Return the control vector file that `source` means: a GGUF file in the adapters' folder, with or without
        `.gguf`. Raises `InvalidRequest` if the file does not exist."""
        if self._vectors is not None:
            for name in (source, f"{source}.gguf"):
                if (found := self._vectors.find(name)) is not None:
                    return found
        raise InvalidRequest(
            f"source: got {short_repr(source)}; it must name a GGUF file in the server's folder of adapters "
            "(--adapters-dir). Put the file there, or load the adapter at startup.",
            "source",
        )

    def names(self) -> list[str]:
        """Return the names of all adapters that can be loaded. Reads the disk."""
        found = [] if self._folders is None else self._folders.names()
        return list(dict.fromkeys((*found, *self._hub_ids)))


def parse_adapter(text: str) -> AdapterSpec:
    """Parse `[MODEL:]NAME=SOURCE[@REVISION]`. Without `NAME=`, the name is that of the folder or hub id. Raises
    `InvalidRequest`."""
    model, name, source = _split(text.strip())
    if not source or name == "":
        raise InvalidRequest(f"adapter is {text!r}; {_FORM}", "adapter")
    folder = Path(source).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        return AdapterSpec(name or folder.name, str(folder), None, model)
    if is_adapter_file(source):
        return AdapterSpec(name or folder.stem, str(folder.resolve()), None, model)
    hub_id, at, revision = source.partition("@")
    if not is_hub_id(hub_id) or (at and not is_revision(revision)):
        raise InvalidRequest(
            f"adapter is {text!r}: {source!r} is neither a folder, a GGUF file nor a hub id; {_FORM}", "adapter"
        )
    return AdapterSpec(name or hub_id, hub_id, revision or None, model)


def _split(text: str) -> tuple[str | None, str | None, str]:
    """Split an adapter's text into its model, name and source."""
    told, equals, source = text.partition("=")
    if not equals or Path(text).expanduser().is_dir():  # a folder's name may contain any character, also `=`
        return None, None, text
    model, _, name = told.rpartition(":")
    return model.strip() or None, name.strip(), source.strip()


def parse_adapters(texts: Iterable[str]) -> tuple[AdapterSpec, ...]:
    """Parse several adapters. Raises `InvalidRequest` if two adapters of one model have the same name."""
    specs = tuple(parse_adapter(text) for text in texts)
    seen: set[tuple[str | None, str]] = set()
    for spec in specs:
        if (spec.model, spec.name) in seen:
            raise InvalidRequest(f"two adapters have the name {spec.name!r}; give one of them another name", "adapter")
        seen.add((spec.model, spec.name))
    return specs


def is_revision(text: str) -> bool:
    """Return whether `text` looks like a branch, a tag or a commit."""
    return 0 < len(text) <= 100 and ".." not in text and all(part and is_hub_name(part) for part in text.split("/"))


def _allowed(text: str) -> tuple[str, str | None]:
    """Parse an allowed hub id. Returns the id and its only allowed revision (None: any revision)."""
    name, at, revision = text.partition("@")
    if not is_hub_id(name) or (at and not is_revision(revision)):
        raise InvalidRequest(
            f"allow_adapter is {text!r}; must be a hub id such as 'owner/name' or 'owner/name@revision'",
            "allow_adapter",
        )
    return name, revision or None


def unpack_source(config: ModelConfig, source: str) -> str:
    """Return `source`. If `source` is a GGUF file, convert it for the model of `config` and return the converted
    folder. Raises `AdapterRefused`."""
    if not is_adapter_file(source):
        return source
    from bridle.gguf.adapter import unpack_adapter
    from bridle.model.checkpoint import read_json
    from bridle.model.hub_lookup import folder_of

    folder = folder_of(config)
    return str(unpack_adapter(Path(source), read_json(folder / "config.json", required=True)))
