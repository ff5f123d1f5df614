"""Folders and files under a root folder that a name from a client may mean.

A name from a client is looked up, never used as a path. A name means a folder at most two levels below the root.
Neither the folder nor its files may be outside of the root. A folder is found if it contains a marker file. A file is
found by its extension.
"""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from bridle.errors import InvalidRequest
from bridle.gguf.shards import is_first_piece, pieces_of

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?", re.ASCII)
_MAX_LISTED = 1_000
_MAX_FILES = 10_000
_LOOK_SECONDS = 2.0


class _Named(ABC):
    """Named files or folders under `root`. The disk is read for each lookup, so new folders and files need no restart.
    Raises `InvalidRequest` about `param` if the root is not a folder."""

    def __init__(self, root: Path, param: str) -> None:
        self._root = _folder(root, param)
        self._seen: tuple[float, list[str]] = (-math.inf, [])  # time of the last listing, and its names

    @abstractmethod
    def find(self, name: str) -> Path | None:
        """Return the path that a name means, if it and all of its files really are under the root; otherwise None."""

    @abstractmethod
    def _scan(self) -> Iterator[str]:
        """Yield all names that are on disk now."""

    def names(self) -> list[str]:
        """Return all names, or only the first names if there are very many. The disk is read only every few seconds,
        because listing a large folder is slow."""
        now = time.monotonic()
        looked, found = self._seen
        if not now - looked < _LOOK_SECONDS:
            found = sorted(islice(self._scan(), _MAX_LISTED))
            self._seen = now, found
        return found


class NamedFolders(_Named):
    """The folders that contain a file `marker`, by their path relative to the root."""

    def __init__(self, root: Path, marker: str, param: str) -> None:
        super().__init__(root, param)
        self._prefixes = (f"{self._root}/", f"{root.expanduser().absolute()}/")
        self._marker = marker

    def find(self, name: str) -> Path | None:
        if not is_hub_name(name):
            return None
        try:
            folder = (self._root / name).resolve(strict=True)
            files = list(islice(folder.iterdir(), _MAX_FILES + 1))
            inside = all(path.resolve(strict=True).is_relative_to(self._root) for path in (folder, *files))
        except (OSError, RuntimeError):  # the folder is missing, is a file, or is a loop of links
            return None
        is_marked = (folder / self._marker).is_file() and len(files) <= _MAX_FILES
        return folder if inside and is_marked and folder != self._root else None

    def name_of(self, path: str) -> str:
        """Return the name of a folder that is given by its full path. A text that is not a full path is returned
        unchanged. This function does not read the disk, so `find` must check the result."""
        for prefix in self._prefixes:
            if path.startswith(prefix):
                return path.removeprefix(prefix).rstrip("/")
        return path

    def _scan(self) -> Iterator[str]:
        for path in self._root.glob(f"*/{self._marker}"):
            if self.find(path.parent.name) is not None:
                yield path.parent.name
        for path in self._root.glob(f"*/*/{self._marker}"):
            name = f"{path.parent.parent.name}/{path.parent.name}"
            if self.find(name) is not None:
                yield name


class NamedFiles(_Named):
    """The GGUF files in the root or in a folder directly below it, by their path relative to the root. A model that
    consists of several files has the name of its first file."""

    def find(self, name: str) -> Path | None:
        if not is_hub_name(name) or not name.lower().endswith(".gguf") or not is_first_piece(name.rpartition("/")[2]):
            return None
        try:
            files = [path.resolve(strict=True) for path in pieces_of(self._root / name)]
        except (OSError, RuntimeError):  # a file is missing, or a loop of links
            return None
        inside = all(path.is_relative_to(self._root) and path.is_file() for path in files)
        return self._root / name if inside else None

    def _scan(self) -> Iterator[str]:
        for pattern in ("*.[gG][gG][uU][fF]", "*/*.[gG][gG][uU][fF]"):
            for path in self._root.glob(pattern):
                name = path.relative_to(self._root).as_posix()
                if self.find(name) is not None:
                    yield name


def is_hub_name(name: str) -> bool:
    """Return whether `name` looks like a hub id: one or two parts, none of which leads out of a folder."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def _folder(path: Path, param: str) -> Path:
    try:
        folder = path.expanduser().resolve(strict=True)
    except OSError as error:
        raise InvalidRequest(f"{param} {path} cannot be used: {error.strerror}", param) from None
    if not folder.is_dir():
        raise InvalidRequest(f"{param} {path} is not a folder", param)
    return folder
