"""`bridle adapters`: the LoRA adapters of a running server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import App, Parameter

from bridle.cli.api import Server
from bridle.cli.terminal import say

Model = Annotated[str | None, Parameter(name="--model")]

app = App(name="adapters", help="List, load and unload the LoRA adapters of a running server.")
_SERVER = Server()


@app.command(name="list")
def list_adapters(*, model: Model = None, server: Server = _SERVER) -> int:
    """List adapters: name, model, state, rank, size, requests that use it, layers it changes.

    Parameters
    ----------
    model
        Whose adapters. Default: those of all models.
    """
    found = server.api().adapters(model)
    for row in found:
        _print(row)
    if not found:
        print("no adapters: `bridle serve --adapter NAME=SOURCE` or `bridle adapters load` adds one", file=sys.stderr)
    return 0


@app.command
def load(
    name: Annotated[str, Parameter(name="NAME")],
    source: Annotated[str | None, Parameter(name="SOURCE")] = None,
    /,
    *,
    revision: str | None = None,
    model: Model = None,
    server: Server = _SERVER,
) -> int:
    """Load an adapter, so that requests may choose it. Needs the key of an admin.

    Parameters
    ----------
    name
        How requests shall call it.
    source
        A folder of the server's `--adapters-dir`, or a hub id that it allows. Default: what NAME says.
    revision
        Branch, tag or commit of a hub id.
    model
        Whose adapter it is. Default: the first model's.
    """
    body = {"name": name, "source": source, "revision": revision, "model": model}
    _print(server.api().load_adapter({field: value for field, value in body.items() if value is not None}))
    return 0


@app.command
def unload(name: Annotated[str, Parameter(name="NAME")], /, *, model: Model = None, server: Server = _SERVER) -> int:
    """Remove an adapter. Requests that use it run to their end. Needs the key of an admin.

    Parameters
    ----------
    name
        How requests call it.
    model
        Whose adapter it is. Default: that of the model that has one of this name.
    """
    server.api().unload_adapter(name, model)
    print(f"unloaded {name}")
    return 0


def _print(row: dict[str, Any]) -> None:
    line = f"{row['id']:<30} {row['model']:<20} {row['state']:<8}"
    if "rank" in row:
        size = f"{row['num_bytes'] / (1 << 20):.1f} MiB"
        line += f"  rank {row['rank']:<4} {size:>12}  {row['num_users']:>4} users  {', '.join(row['targets'])}"
    say(line + (f"  {row['error']}" if row.get("error") else ""))
