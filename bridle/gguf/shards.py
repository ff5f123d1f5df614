"""Reads a model from one GGUF file or several. The files of a split model are found by their names, and checked to
belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridle.errors import UnsupportedModel
from bridle.gguf.reader import GgufFile, TensorEntry, open_gguf
from bridle.safe_repr import short_repr

_PIECE = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
MAX_PIECES = 1_000


class GgufModel:
    """All files of a model, read like one file. `metadata` comes from the first file."""

    def __init__(self, files: Sequence[GgufFile]) -> None:
        self.files = tuple(files)
        self.path = self.files[0].path
        self.metadata: Mapping[str, Any] = self.files[0].metadata
        self.tensors: dict[str, TensorEntry] = {}
        self._homes: dict[str, GgufFile] = {}
        for file in self.files:
            for name, entry in file.tensors.items():
                if name in self.tensors:
                    raise UnsupportedModel(f"{file.path} holds tensor {short_repr(name)}, as another file does")
                self.tensors[name], self._homes[name] = entry, file

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a tensor's bytes, [rows, bytes per row]."""
        return self._homes[name].read(name)

    @property
    def num_values(self) -> int:
        return sum(entry.num_values for entry in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors.values())

    def text(self, key: str) -> str | None:
        """Return a string of the metadata; None if the key is absent."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise UnsupportedModel(f"{self.path}: key {key} is {short_repr(value)}, which is not a string")
        return value

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int = 1 << 40) -> int:
        """Return an integer of the metadata between `low` and `high`. Raises `UnsupportedModel` if the key is absent
        and there is no `default`."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UnsupportedModel(
                f"{self.path}: key {key} is {short_repr(value)}; must be a whole number from {low} to {high}"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a real number of the metadata."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) > 1e30:
            raise UnsupportedModel(f"{self.path}: key {key} is {short_repr(value)}, which is not a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{self.path}: key {key} is {short_repr(value)}; must be true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings of the metadata; empty if the key is absent."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UnsupportedModel(f"{self.path}: key {key} is not a list of strings")
        return value

    def numbers(self, key: str) -> np.ndarray[Any, Any]:
        """Return a list of numbers of the metadata; empty if the key is absent."""
        value = self.metadata.get(key)
        if value is None:
            return np.empty(0)
        if not isinstance(value, np.ndarray):
            raise UnsupportedModel(f"{self.path}: key {key} is not a list of numbers")
        return value


def open_model(path: Path) -> GgufModel:
    """Open the model in `path` and the files that belong to it. Raises `UnsupportedModel`."""
    first = open_gguf(path)
    count = _count(first, "split.count")
    if count <= 1:
        return GgufModel([first])
    named = _PIECE.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise UnsupportedModel(
            f"{path} is one of {count} split files; these must be named like 'name-00001-of-{count:05d}.gguf'"
        )
    files = [_piece(first, path, f"{named[1]}-{number + 1:05d}-of-{count:05d}.gguf", number) for number in range(count)]
    model = GgufModel(files)
    claimed = _count(files[0], "split.tensors.count")
    if claimed and claimed != len(model.tensors):
        raise UnsupportedModel(f"{path} claims {claimed} tensors in all; its split files hold {len(model.tensors)}")
    return model


def _piece(given: GgufFile, path: Path, name: str, number: int) -> GgufFile:
    sibling = path.with_name(name)
    if not sibling.is_file():
        raise UnsupportedModel(f"{path} is one of several split files, and {name} is missing next to it")
    file = given if sibling.name == path.name else open_gguf(sibling)
    if _count(file, "split.no") != number:
        raise UnsupportedModel(f"{sibling} has split.no {_count(file, 'split.no')}, which does not match its file name")
    return file


def _count(file: GgufFile, key: str) -> int:
    value = file.metadata.get(key, 0)
    limit = MAX_PIECES if key != "split.tensors.count" else 1 << 24
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise UnsupportedModel(f"{file.path}: key {key} is {short_repr(value)}; must be 0 to {limit}")
    return value


def pieces_of(path: Path) -> list[Path]:
    """Return the paths of all files, which need not exist, of the model whose first or only file is `path`."""
    named = _PIECE.fullmatch(path.name)
    if named is None:
        return [path]
    count = min(int(named[3]), MAX_PIECES)
    return [path.with_name(f"{named[1]}-{number + 1:05d}-of-{named[3]}.gguf") for number in range(count)]


def is_first_piece(name: str) -> bool:
    """Return whether the name of a file is that of a model's first or only file. The vision tower that llama.cpp reads
    next to a model (`mmproj`) is not a model."""
    named = _PIECE.fullmatch(name)
    return "mmproj" not in name.lower() and (named is None or int(named[2]) == 1)
