"""The pointer from a model folder that bridle unpacked to the GGUF file with its weights. Reading a pointer does not
import the GGUF reader, because even processes that need only a tokenizer look for a pointer."""

from __future__ import annotations

import json
from pathlib import Path

from bridle import file_cache
from bridle.errors import UnsupportedModel

#: The file in a folder that names the GGUF file with the weights.
POINTER = "gguf.json"
_MAX_LINKS = 4096


def cache_folder() -> Path:
    """Return the cache folder for GGUF files."""
    return file_cache.cache_folder() / "gguf"


def weights_of(folder: Path) -> Path | None:
    """Return the GGUF file of a folder in the cache; None for any other folder, whatever files it contains."""
    found = _pointer(folder)
    return None if found is None else Path(found["path"])


def tower_of(folder: Path) -> Path | None:
    """Return the GGUF file with the vision tower of a folder in the cache; None if the folder has no vision tower."""
    found = _pointer(folder)
    return None if found is None or "tower" not in found else Path(found["tower"])


def _pointer(folder: Path) -> dict[str, str] | None:
    pointer = folder / POINTER
    if not folder.resolve().is_relative_to(cache_folder().resolve()) or not pointer.is_file():
        return None
    try:
        if pointer.stat().st_size > _MAX_LINKS:
            raise ValueError("the file is too long")
        found = json.loads(pointer.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(isinstance(each, str) for each in (found["path"], *found.values())):
            raise ValueError("the file names no GGUF file")
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{pointer} is damaged: {error}; remove {folder}") from None
