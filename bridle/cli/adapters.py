"""`bridle adapters`: the LoRA adapters of a running server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import App, Parameter

from bridle.cli.api import Server
from bridle.cli.short_help import epilogue
from bridle.cli.terminal import say

Model = Annotated[str | None, Parameter(name="--model")]

app = App(
    name="adapters",
    help="List, load and unload the LoRA adapters of a running server.",
    help_epilogue=epilogue("adapters"),
)


@app.command(name="list")
def list_adapters(*, model: Model = None, server: Server = Server()) -> int:
    """List adapters: name, model, state, rank, size, number of requests, changed layers.

    Parameters
    ----------
    model
        Model of the adapters. Default: all models.
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
    replace: bool = False,
    model: Model = None,
    server: Server = Server(),
) -> int:
    """Load an adapter, so that requests may choose it. Needs an admin's key.

    Parameters
    ----------
    name
        Name of the adapter in requests.
    source
        Folder in the server's `--adapters-dir`, or a hub id that the server allows. Default: NAME.
    revision
        Branch, tag or commit of a hub id.
    replace
        Take the place of a loaded adapter of this name. Running requests keep the old adapter.
    model
        Model of the adapter. Default: the first model.
    """
    body = {"name": name, "source": source, "revision": revision, "model": model, "replace": replace or None}
    _print(server.api().load_adapter({field: value for field, value in body.items() if value is not None}))
    return 0


@app.command
def unload(name: Annotated[str, Parameter(name="NAME")], /, *, model: Model = None, server: Server = Server()) -> int:
    """Remove an adapter. Running requests finish. Needs an admin's key.

    Parameters
    ----------
    name
        Name of the adapter in requests.
    model
        Model of the adapter. Default: the model with an adapter of this name.
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
