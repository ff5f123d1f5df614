"""Finds the folder of a model by its name, and downloads it from the hub if necessary. The lookup does not read weights
or import torch. Only safetensors, GGUF, JSON and tokenizer files are downloaded: no pickles, no Python code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.compat.suggestions import closest
from bridle.demo import DEMO_MODELS, demo_model_path
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.load_progress import on_download
from bridle.model.fetching import Progress, fetch
from bridle.model.hub import ask_hub, is_cached, is_offline
from bridle.model.library import LibraryEntry, find_entry, installed_path, pull_entry

if TYPE_CHECKING:
    from bridle.config import ModelConfig

#: The files that are downloaded from the hub. `*.txt` and `*.model` are vocabularies of older tokenizers.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.txt", "tokenizer*", "*.model", "*.jinja")
HUB_IGNORED = ("original/*", "*.bin", "*.pt", "*.pth", "*.py", "*.gguf", "onnx/*", "coreml/*")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?")
_FILE_TYPE = re.compile(r"[A-Za-z0-9_]{2,24}")


def resolve_model(
    model: str, revision: str | None = None, progress: Progress | None = None, mmproj: str | None = None
) -> Path:
    """Return the folder of `model`, which is downloaded or found in the hub's cache.

    `model` is a demo model (`demo`, `demo-sees`), a folder, a GGUF file, a hub id, or a name that `bridle pull` lists.
    `owner/name:Q4_K_M` is the GGUF file with this quantization type in a hub repository. If a folder has its weights in
    one GGUF file, this file is used. The metadata of a GGUF file, and the vision tower in the file `mmproj` if given,
    are unpacked into a new folder. A name that `bridle pull` lists means the pulled model, which is downloaded if
    necessary.

    `progress` gets the share of the bytes downloaded so far. Honors `HF_HUB_OFFLINE`. Raises `InvalidRequest` for any
    other name, and `UnsupportedModel` if the hub lacks the model or cannot be reached.
    """
    local = local_path(model)
    if local is not None:
        return _unpacked(local, None, mmproj)
    entry = find_entry(model)
    if entry is not None:
        return _unpacked(pulled(entry, revision, progress), None, mmproj)
    repository, kind = hub_name(model)
    if kind is not None:
        wanted = (f"*{kind}*.gguf", f"*{kind.lower()}*.gguf")
        return _unpacked(fetch(repository, revision, wanted, (), progress), kind, mmproj)
    _refuse_tower(mmproj, model)
    return fetch(repository, revision, HUB_PATTERNS, HUB_IGNORED, progress)


def folder_of(config: ModelConfig, progress: Progress | None = None) -> Path:
    """Return the folder of the model in a configuration, as `resolve_model` does."""
    return resolve_model(config.model, config.revision, progress, config.mmproj)


def _refuse_tower(mmproj: str | None, model: str) -> None:
    if mmproj is not None:
        raise InvalidRequest(f"mmproj: got {mmproj!r}; it needs a GGUF file, but {model!r} is a folder", "mmproj")


def check_available(model: str, revision: str | None = None) -> None:
    """Check that a model is on this machine or on the hub, without torch and before anything is loaded. Raises the same
    errors as `resolve_model`."""
    if local_path(model) is not None:
        return
    entry = find_entry(model)
    if entry is not None:
        _check_pull(entry, revision)
    else:
        repository, _ = hub_name(model)
        if not is_cached(repository, revision):
            ask_hub(repository, revision)


def pulled(entry: LibraryEntry, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Return the file or folder of a model that `bridle pull` lists; download it unless it exists. Raises
    `InvalidRequest` and `UnsupportedModel`."""
    _check_pull(entry, revision)
    tell = progress or on_download()
    return pull_entry(entry, lambda stage, share: tell(share))


def _check_pull(entry: LibraryEntry, revision: str | None) -> None:
    if revision is not None:
        raise InvalidRequest(
            f"revision is {revision!r}; {entry.name} has one fixed version, so leave --revision out", "revision"
        )
    if installed_path(entry) is None and is_offline():
        raise UnsupportedModel(
            f"{entry.name} is not on this machine, but offline mode is on: unset HF_HUB_OFFLINE and run "
            f"`bridle pull {entry.name}`"
        )


def local_path(model: str) -> Path | None:
    """Return the folder or GGUF file that a name means on this machine; None if the machine has no such file. Raises
    `UnsupportedModel` for a file of another type."""
    if model in DEMO_MODELS:
        return demo_model_path(model)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path.resolve()
    if not path.is_file():
        entry = find_entry(model)
        return None if entry is None else installed_path(entry)
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModel(f"{model!r} is a file; name the folder that holds config.json and *.safetensors")
    return path


def hub_name(model: str) -> tuple[str, str | None]:
    """Return the hub repository that a name means, and the type of GGUF file if the name ends in a type. Raises
    `InvalidRequest` for a name that cannot be a hub id."""
    repository, colon, kind = model.partition(":")
    if _HUB_ID.fullmatch(repository) and ".." not in model and (not colon or _FILE_TYPE.fullmatch(kind)):
        return repository, kind or None
    raise InvalidRequest(
        f"{model!r} is neither 'demo', 'demo-sees', an existing folder, a model that `bridle pull` lists, nor a hub id "
        f"such as 'owner/name'"
        f"{_neighbour(model)}",
        "model",
    )


def _neighbour(model: str) -> str:
    """Return a question that suggests the file or folder with the name closest to a path that does not exist."""
    path = Path(model).expanduser()
    try:
        found = closest(path.name, os.listdir(path.parent)) if path.name else None
    except OSError:
        return f"; there is no folder {str(path.parent)!r} either"
    return "" if found is None else f". Did you mean {str(path.parent / found)!r}?"


def _unpacked(folder: Path, kind: str | None, mmproj: str | None) -> Path:
    """Return `folder` if it has a config.json. If `folder` has no config.json, unpack its GGUF file (of type `kind`),
    and return the new folder."""
    tower = None if mmproj is None else Path(mmproj).expanduser()
    if tower is not None and not tower.is_file():
        raise InvalidRequest(f"mmproj: got {mmproj!r}; there is no such file on this machine", "mmproj")
    is_plain = (folder / "config.json").is_file() or (folder.is_dir() and not any(folder.rglob("*.gguf")))
    if kind is None and is_plain:
        _refuse_tower(mmproj, str(folder))
        return folder
    from bridle.gguf.folder import unpack  # imports all model families, which other folders do not need
    from bridle.gguf.shards import is_first_piece

    if folder.is_file():
        return unpack(folder, tower)
    found = sorted(path for path in folder.rglob("*.gguf") if is_first_piece(path.name))
    wanted = [path for path in found if kind is None or kind.lower() in path.stem.lower().replace(".", "-").split("-")]
    wanted = wanted or [path for path in found if kind is not None and kind.lower() in path.stem.lower()]
    if kind is None and not found:
        _refuse_tower(mmproj, str(folder))
        return folder
    if len(wanted) == 1:
        return unpack(wanted[0], tower)
    names = ", ".join(path.name for path in found[:8]) or "none"
    what = f"no GGUF file of type {kind!r}" if not wanted else f"{len(wanted)} GGUF files that are meant"
    raise UnsupportedModel(f"{folder} has {what} ({names}); choose one of them")
