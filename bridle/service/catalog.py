"""Which models may be loaded when a request names them, beside those that the operator gave names to.

A name from the network is looked up, never followed: it is a folder right under the models' folder, or a hub id that
was allowed. Nothing else is loadable, whatever it looks like.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bridle.config import ModelConfig
from bridle.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?", re.ASCII)
_MAX_LISTED = 1_000
_MAX_FILES = 10_000
_LOOK_SECONDS = 2.0


class ModelCatalog:
    """Configurations by name. `base` says how models are loaded; which one, an entry says.

    Folders under `models_dir`, at most two levels deep, are loadable by their path from there; they are looked at when
    somebody asks, so new ones need no restart.
    """

    def __init__(
        self,
        base: ModelConfig | None = None,
        *,
        models_dir: Path | None = None,
        hub_ids: Iterable[str] = (),
    ) -> None:
        self._base = replace(base or ModelConfig(), revision=None, tokenizer=None)
        self._hub_ids = tuple(dict.fromkeys(hub_ids))
        for hub_id in self._hub_ids:
            if not is_model_name(hub_id):
                raise InvalidRequest(f"allow_hub is {hub_id!r}; must be a hub id such as 'owner/name'", "allow_hub")
        self._folder = None if models_dir is None else _folder(models_dir)
        self._seen: tuple[float, list[str]] = (-math.inf, [])  # when the folder was looked through, and what was there

    def find(self, name: str) -> ModelConfig | None:
        """What is loaded under that name; None if it may not be, or is not there."""
        folder = self._folder_of(name)
        if folder is not None:
            return replace(self._base, model=str(folder))
        return replace(self._base, model=name) if name in self._hub_ids else None

    def names(self) -> list[str]:
        """Every name that can be loaded (of very many folders, the first). Looks at the disk, every few seconds at
        most: a large folder takes a while."""
        now = time.monotonic()
        looked, found = self._seen
        if self._folder is not None and not now - looked < _LOOK_SECONDS:
            found = sorted(islice(self._scan(self._folder), _MAX_LISTED))
            self._seen = now, found
        return list(dict.fromkeys((*found, *self._hub_ids)))

    @property
    def is_empty(self) -> bool:
        """Whether nothing can ever be loaded from here."""
        return not self._hub_ids and self._folder is None

    def _folder_of(self, name: str) -> Path | None:
        """The model folder of that name, if it and all its files really lie under the models' folder."""
        root = self._folder
        if root is None or not is_model_name(name):
            return None
        try:
            folder = (root / name).resolve(strict=True)
            files = list(islice(folder.iterdir(), _MAX_FILES + 1))
            inside = all(path.resolve(strict=True).is_relative_to(root) for path in (folder, *files))
        except (OSError, RuntimeError):  # not there, no folder, or links in a circle
            return None
        is_model = (folder / "config.json").is_file() and len(files) <= _MAX_FILES
        return folder if inside and is_model and folder != root else None

    def _scan(self, root: Path) -> Iterator[str]:
        for path in root.glob("*/config.json"):
            if self._folder_of(path.parent.name) is not None:
                yield path.parent.name
        for path in root.glob("*/*/config.json"):
            name = f"{path.parent.parent.name}/{path.parent.name}"
            if self._folder_of(name) is not None:
                yield name


def is_model_name(name: str) -> bool:
    """Whether it looks like a hub id: one part or two, and no way out of a folder."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def _folder(path: Path) -> Path:
    try:
        folder = path.expanduser().resolve(strict=True)
    except OSError as error:
        raise InvalidRequest(f"models_dir {path} cannot be used: {error.strerror}", "models_dir") from None
    if not folder.is_dir():
        raise InvalidRequest(f"models_dir {path} is not a folder", "models_dir")
    return folder
