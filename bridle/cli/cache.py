"""`bridle cache`: the files that bridle stores so that models load faster and prompts are not computed again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from bridle.cli.short_help import epilogue

if TYPE_CHECKING:
    from bridle.kv_store.store import ScopeFiles

Store = Annotated[str, Parameter(name="--kv-store")]
app = App(name="cache", help="List and clear the cached files of models and prompts.", help_epilogue=epilogue("cache"))


@app.command(name="list")
def list_entries(
    *, kv_store: Store = "auto", as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
) -> int:
    """List the cached files: kind, size, last use, file. All KV blocks of a model are one line. The last line has the
    total, and the limit.

    Parameters
    ----------
    kv_store
        Folder of the KV blocks: DIR, or `auto` for the one in the user's cache.
    as_json
        Print one JSON object a line, without the last line.
    """
    from bridle.file_cache import cache_folder, cache_limit, entries

    found, scopes = entries()[::-1], _scopes(kv_store)
    rows = [(entry.path.parent.name, entry.num_bytes, entry.used, entry.path) for entry in found]
    rows += [("kv", scope.num_bytes, scope.used, scope.folder) for scope in scopes]
    if as_json:
        for kind, num_bytes, used, path in rows:
            print(json.dumps({"kind": kind, "num_bytes": num_bytes, "used": used, "path": str(path)}))
        return 0
    for kind, num_bytes, used, path in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
        print(f"{kind:<12} {_size(num_bytes):>10}  {when}  {path.name}")
    total = sum(entry.num_bytes for entry in found)
    print(f"{len(found)} entries, {_size(total)} of at most {_size(cache_limit())}, in {cache_folder()}")
    if scopes:
        print(f"KV of {len(scopes)} model{'s' * (len(scopes) != 1)}, {_size(sum(scope.num_bytes for scope in scopes))}")
    return 0


@app.command
def clear(*names: str, kv_store: Store = "auto") -> int:
    """Remove cached files. Running processes continue. After this command, models are loaded and prompts are computed
    as for the first time.

    Parameters
    ----------
    names
        Remove only files with one of these texts in their names. Default: all.
    kv_store
        Folder of the KV blocks: DIR, or `auto` for the one in the user's cache.
    """
    from bridle.file_cache import entries, remove_oldest
    from bridle.kv_store.store import remove_scope

    chosen = [entry for entry in entries() if _is_chosen(entry.path, names)]
    scopes = [scope for scope in _scopes(kv_store) if _is_chosen(scope.folder, names)]
    for entry in chosen:
        entry.path.unlink(missing_ok=True)
    freed = sum(entry.num_bytes for entry in chosen) + (0 if names else remove_oldest(0))
    print(f"removed {len(chosen)} entries, {_size(freed)}")
    if scopes:
        freed = sum(remove_scope(scope.folder) for scope in scopes)
        print(f"removed KV of {len(scopes)} model{'s' * (len(scopes) != 1)}, {_size(freed)}")
    return 0


@app.command
def forget(user: str, /, *, kv_store: Store = "auto") -> int:
    """Erase the KV blocks of a user. A running server no longer finds the erased blocks. The server may store blocks of
    this user again that are still in memory, so restart it first.

    Parameters
    ----------
    user
        User as in the file of keys; "" for requests without a user.
    kv_store
        Folder of the KV blocks: DIR, or `auto` for the one in the user's cache.
    """
    from bridle.kv_store import forget_tenant

    print(f"erased {forget_tenant(_folder(kv_store), user)} blocks")
    return 0


def _scopes(kv_store: str) -> list[ScopeFiles]:
    from bridle.kv_store.store import list_scopes

    return list_scopes(_folder(kv_store))


def _folder(kv_store: str) -> Path:
    """Return the folder of the KV blocks. The flag's environment variable may be `off` for a server, but this command
    still needs a folder."""
    from bridle.kv_store import default_folder

    return default_folder() if kv_store in ("auto", "off") else Path(kv_store).expanduser()


def _is_chosen(path: Path, names: Sequence[str]) -> bool:
    return not names or any(name in path.name for name in names)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
