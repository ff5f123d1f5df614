"""`bridle cache`: what bridle keeps so that models load sooner."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from bridle.cli.short_help import epilogue

if TYPE_CHECKING:
    from bridle.file_cache import CacheFile

app = App(
    name="cache",
    help="List and clear what is kept so that models load sooner. All of it can be made anew.",
    help_epilogue=epilogue("cache"),
)


@app.command(name="list")
def list_entries(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """List what is kept: kind, size, last use, file. The last line has the total, and the limit.

    Parameters
    ----------
    as_json
        Print one JSON object a line, without the last line.
    """
    from bridle.file_cache import cache_folder, cache_limit, entries

    found = entries()[::-1]
    if as_json:
        for entry in found:
            record = {"kind": _kind(entry), "num_bytes": entry.num_bytes, "used": entry.used, "path": str(entry.path)}
            print(json.dumps(record))
        return 0
    for entry in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{_kind(entry):<12} {_size(entry.num_bytes):>10}  {used}  {entry.path.name}")
    total = sum(entry.num_bytes for entry in found)
    print(f"{len(found)} entries, {_size(total)} of at most {_size(cache_limit())}, in {cache_folder()}")
    return 0


@app.command
def clear(*names: str) -> int:
    """Remove what is kept. What runs goes on; models are then loaded as for the first time.

    Parameters
    ----------
    names
        Remove only files with one of these texts in their names. Default: all.
    """
    from bridle.file_cache import entries, remove_oldest

    chosen = [entry for entry in entries() if _is_chosen(entry, names)]
    for entry in chosen:
        entry.path.unlink(missing_ok=True)
    freed = sum(entry.num_bytes for entry in chosen) + (0 if names else remove_oldest(0))
    print(f"removed {len(chosen)} entries, {_size(freed)}")
    return 0


def _is_chosen(entry: CacheFile, names: Sequence[str]) -> bool:
    return not names or any(name in entry.path.name for name in names)


def _kind(entry: CacheFile) -> str:
    return entry.path.parent.name


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
