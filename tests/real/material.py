"""Paths of the real models and programs that these tests need. A test whose file is missing is skipped, and the message
says how to get the file."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

from bridle.model.library.entries import LibraryEntry, find_entry
from bridle.model.library.package_index import file_digest
from tests.leftovers import kept_folder
from tests.sources import ROOT

#: Models that write text, and the one that makes embeddings, as `bridle pull` calls them.
WRITERS = ("smollm2", "gemma3:270m", "qwen2.5-coder:0.5b", "qwen2.5-coder:1.5b")
EMBEDDER = "minilm"

#: A folder of models as `bridle pull` makes it; that of `make test-real` if it is not set.
FOLDER, USUAL_FOLDER = "BRIDLE_REAL_MODELS", ROOT / "build" / "models"
#: A Python that has llama.cpp's bindings.
LLAMACPP = "BRIDLE_LLAMACPP_PYTHON"


def variable_of(name: str) -> str:
    """Return the environment variable with a model's file: `BRIDLE_GEMMA3_270M` for `gemma3:270m`."""
    return "BRIDLE_" + re.sub(r"\W", "_", name).upper()


@cache
def model_path(name: str) -> Path:
    """Return a model's checked file or folder; skip the test if it is missing."""
    entry = find_entry(name)
    assert entry is not None
    path = _given(entry) or _pulled(entry)
    if path is None:
        pytest.skip(f"{entry.title} is not here: `make test-real` pulls it, or {variable_of(name)} names its file")
    if path.is_dir():
        return path
    assert file_digest(path) == entry.sha256, f"{path} is another file than `bridle pull {name}` fetches"
    return _unpacked(path) if entry.is_archive else path


def llamacpp_python() -> str:
    """Return a Python that has llama.cpp's bindings; skip the test if there is none."""
    if given := os.environ.get(LLAMACPP):
        return given
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip(
            "llama.cpp's bindings are not here: `pip install 'bridle-llm[llamacpp]'` compiles them (minutes), or "
            f"{LLAMACPP} names a Python that has them"
        )
    return sys.executable


def num_threads() -> int:
    """Return the number of processors; small models have one thread, as their tests run in parallel."""
    return len(os.sched_getaffinity(0))


def _given(entry: LibraryEntry) -> Path | None:
    given = os.environ.get(variable_of(entry.name))
    return Path(given) if given else None


def _pulled(entry: LibraryEntry) -> Path | None:
    path = ROOT / os.environ.get(FOLDER, USUAL_FOLDER) / entry.folder_name
    path = path if entry.is_archive else path / entry.file
    return path if path.exists() else None


def _unpacked(archive: Path) -> Path:
    folder = kept_folder("bridle-real-")
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    return folder
