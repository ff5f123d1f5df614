"""Catalog of models that are loaded when a request names them, in addition to the models that the operator named.

The name from a client is looked up in the catalog and never used as a path. A name can mean a folder or GGUF file under
the models' folder, an allowed hub id, or, if permitted, a pulled model. A name that means neither a folder, a file, an
allowed hub id nor a pulled model cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from bridle.config import ModelConfig
from bridle.demo import DEMO_MODELS, demo_model_path
from bridle.errors import InvalidRequest
from bridle.model.library import find_entry, installed_entries, installed_path
from bridle.serving.models.model_folders import NamedFiles, NamedFolders, is_hub_name


class ModelCatalog:
    """The configurations of loadable models, by name. `base` has the settings for loading; each entry adds its model.

    Folders and GGUF files under `models_dir`, at most two levels deep, are loadable. The name of a model in
    `models_dir` is its path relative to that folder. The disk is read for each request, so new files need no restart.
    With `pulled`, models that `bridle pull` has stored on this machine are loadable too. The demo models are loadable
    too, but `names` does not list them.
    """

    def __init__(
        self,
        base: ModelConfig | None = None,
        *,
        models_dir: Path | None = None,
        hub_ids: Iterable[str] = (),
        pulled: bool = False,
    ) -> None:
        self._base = replace(base or ModelConfig(), revision=None, tokenizer=None, mmproj=None)
        self.may_pull = pulled
        self._hub_ids = tuple(dict.fromkeys(hub_ids))
        for hub_id in self._hub_ids:
            if not is_hub_name(hub_id):
                raise InvalidRequest(f"allow_hub is {hub_id!r}; must be a hub id such as 'owner/name'", "allow_hub")
        self._folders = None if models_dir is None else NamedFolders(models_dir, "config.json", "models_dir")
        self._files = None if models_dir is None else NamedFiles(models_dir, "models_dir")

    def find(self, name: str) -> ModelConfig | None:
        """Return the configuration of the model with this name; None if the model does not exist or may not be
        loaded."""
        folder = None if self._folders is None else self._folders.find(name)
        found = folder or (None if self._files is None else self._files.find(name))
        if found is None and self.may_pull:
            found = _pulled(name)
        if found is not None:
            return replace(self._base, model=str(found))
        return replace(self._base, model=name) if name in self._hub_ids else None

    def names(self) -> list[str]:
        """Return the names of all models that can be loaded. If there are too many folders, only the names of the first
        folders are returned. Reads the disk."""
        folders = [] if self._folders is None else self._folders.names()
        files = [] if self._files is None else self._files.names()
        pulled = [entry.name for entry in installed_entries()] if self.may_pull else []
        return list(dict.fromkeys((*folders, *files, *self._hub_ids, *pulled)))

    @property
    def is_empty(self) -> bool:
        """Return whether this catalog allows no model to be loaded."""
        return not (self.has_own or self.may_pull)

    @property
    def has_own(self) -> bool:
        """Return whether the operator configured a folder of models or hub ids."""
        return bool(self._hub_ids) or self._folders is not None


def _pulled(name: str) -> Path | None:
    """Return the files of a demo model, or of the pulled model with exactly this name."""
    if name in DEMO_MODELS:
        return demo_model_path(name)
    entry = find_entry(name)
    return installed_path(entry) if entry is not None and entry.name == name else None
