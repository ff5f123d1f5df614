"""Lists models on this machine by source: models that come with bridle, pulled models, and the hub's local cache. To
add a source, write a class with the methods of `ModelSource`, and add it to `SOURCES`. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bridle.demo import DEMO_MODELS, demo_model_path
from bridle.errors import InvalidRequest
from bridle.model.fetching import Progress
from bridle.model.hub_lookup import hub_name, local_path, pulled, resolve_model
from bridle.model.library import find_entry, installed_entries, installed_path, remove_entry


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine. `kind` names its source; `modified` is a time in seconds since 1970."""

    name: str
    kind: str
    num_bytes: int
    modified: float


class ModelSource(Protocol):
    """Interface of a source of models."""

    def stored(self) -> Iterator[StoredModel]:
        """Yield the models of this source that are on this machine."""

    def has(self, name: str) -> bool:
        """Return whether a name belongs to this source."""

    def pull(self, name: str, revision: str | None, progress: Progress) -> Path:
        """Download a model, and return its folder. Raises `InvalidRequest` and `UnsupportedModel`."""

    def remove(self, name: str) -> bool:
        """Delete a model from this machine. Return whether the model existed. Raises `InvalidRequest`."""


class Packaged:
    """The source of the demo models, which are part of the package."""

    def stored(self) -> Iterator[StoredModel]:
        for name in DEMO_MODELS:
            files = [path.stat() for path in demo_model_path(name).rglob("*") if path.is_file()]
            yield StoredModel(
                name, "packaged", _num_bytes(demo_model_path(name)), max((file.st_mtime for file in files), default=0.0)
            )

    def has(self, name: str) -> bool:
        return name in DEMO_MODELS

    def pull(self, name: str, revision: str | None, progress: Progress) -> Path:
        raise InvalidRequest(f"NAME is {name!r}, which comes with bridle: there is nothing to download", "NAME")

    def remove(self, name: str) -> bool:
        raise InvalidRequest(f"NAME is {name!r}, which comes with bridle and cannot be removed", "NAME")


class Library:
    """The source of models with short names, which are pulled into the user's folder."""

    def stored(self) -> Iterator[StoredModel]:
        for entry in installed_entries():
            path = installed_path(entry)
            if path is not None:
                yield StoredModel(entry.name, "pulled", _num_bytes(path), path.stat().st_mtime)

    def has(self, name: str) -> bool:
        return find_entry(name) is not None

    def pull(self, name: str, revision: str | None, progress: Progress) -> Path:
        entry = find_entry(name)
        assert entry is not None
        return pulled(entry, revision, progress)

    def remove(self, name: str) -> bool:
        entry = find_entry(name)
        return entry is not None and remove_entry(entry)


class HubCache:
    """The source of models from the hub, which are in the hub's cache on this machine."""

    def stored(self) -> Iterator[StoredModel]:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        try:
            found = scan_cache_dir().repos
        except (CacheNotFound, ValueError):
            return
        for repository in sorted(found, key=lambda each: each.repo_id.lower()):
            if repository.repo_type == "model":
                yield StoredModel(repository.repo_id, "hub", repository.size_on_disk, repository.last_modified)

    def has(self, name: str) -> bool:
        return local_path(name) is None

    def pull(self, name: str, revision: str | None, progress: Progress) -> Path:
        from bridle.model.hub import ask_hub

        ask_hub(hub_name(name)[0], revision)  # its error explains more than the error of the download
        return resolve_model(name, revision, progress)

    def remove(self, name: str) -> bool:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        try:
            cache = scan_cache_dir()
        except (CacheNotFound, ValueError):
            return False
        found = [each for each in cache.repos if each.repo_type == "model" and each.repo_id == name]
        revisions = [revision.commit_hash for each in found for revision in each.revisions]
        cache.delete_revisions(*revisions).execute()
        return bool(revisions)


def _num_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


SOURCES: tuple[ModelSource, ...] = (Packaged(), Library(), HubCache())


def stored_models() -> Iterator[StoredModel]:
    """Yield the models of all sources that are on this machine. Each model of a source can be used by name, without a
    path."""
    for source in SOURCES:
        yield from source.stored()


def pull_model(name: str, revision: str | None, progress: Progress) -> Path:
    """Download a model, and return its folder. Raises `InvalidRequest` for a name that no source has."""
    for source in SOURCES:
        if source.has(name):
            return source.pull(name, revision, progress)
    raise InvalidRequest(f"NAME is {name!r}, which is on this machine already: there is nothing to download", "NAME")


def remove_model(name: str) -> None:
    """Delete a model from this machine. Raises `InvalidRequest` for a name that no source has."""
    for source in SOURCES:
        if source.has(name):
            if source.remove(name):
                return
            break
    else:
        if local_path(name) is not None:
            raise InvalidRequest(f"NAME is {name!r}, a file or folder of your own; delete it yourself", "NAME")
    raise InvalidRequest(f"NAME is {name!r}, which is not on this machine; `bridle list` shows the models here", "NAME")
