"""Where models on this machine come from, and what there is: models that come with bridle, and the hub's local cache.

A further source is a class with the methods of `ModelSource` and a place in `SOURCES`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bridle.demo import DEMO_MODELS, demo_model_path
from bridle.errors import InvalidRequest
from bridle.model.fetching import Progress
from bridle.model.hub_lookup import hub_name, local_path, resolve_model


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine. `kind` says where it came from; `modified` is a time in seconds since 1970."""

    name: str
    kind: str
    num_bytes: int
    modified: float


class ModelSource(Protocol):
    """A place that models come from."""

    def stored(self) -> Iterator[StoredModel]:
        """The models of this source that are on this machine."""

    def has(self, name: str) -> bool:
        """Whether this source is the one for a name."""

    def pull(self, name: str, revision: str | None, progress: Progress) -> Path:
        """Download a model, and return its folder. Raises `InvalidRequest` and `UnsupportedModel`."""


class Packaged:
    """The demo models, which are part of the package."""

    def stored(self) -> Iterator[StoredModel]:
        for name in DEMO_MODELS:
            files = [path.stat() for path in demo_model_path(name).rglob("*") if path.is_file()]
            yield StoredModel(
                name,
                "packaged",
                sum(file.st_size for file in files),
                max((file.st_mtime for file in files), default=0.0),
            )

    def has(self, name: str) -> bool:
        return name in DEMO_MODELS

    def pull(self, name: str, revision: str | None, progress: Progress) -> Path:
        raise InvalidRequest(f"{name!r} comes with bridle: there is nothing to download", "NAME")


class HubCache:
    """The hub, and its cache on this machine."""

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

        ask_hub(hub_name(name)[0], revision)  # its refusal says more than that of the download
        return resolve_model(name, revision, progress)


SOURCES: tuple[ModelSource, ...] = (Packaged(), HubCache())


def stored_models() -> Iterator[StoredModel]:
    """All models on this machine that need no path."""
    for source in SOURCES:
        yield from source.stored()


def pull_model(name: str, revision: str | None, progress: Progress) -> Path:
    """Download a model, and return its folder. Raises `InvalidRequest` for a name that no source has."""
    for source in SOURCES:
        if source.has(name):
            return source.pull(name, revision, progress)
    raise InvalidRequest(f"{name!r} is on this machine already: there is nothing to download", "NAME")
