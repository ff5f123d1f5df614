"""`bridle top`: shows the activity of a server, and updates the view."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bridle.cli.api import ApiError, Server
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridle.cli.api import Api


def top(
    *,
    interval: Annotated[float, Parameter(name=["--interval", "-n"])] = 1.0,
    once: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    server: Server = Server(),
) -> int:
    """Watch a server: queue, batch, cache, controllers and requests.

    Ctrl-C ends the command. A server with API keys needs an admin's key. Scripts may use `bridle top --once --json`.

    Parameters
    ----------
    interval
        Seconds between updates.
    once
        Print one update and exit. Speeds in a single update are averages since the server started.
    as_json
        Print one line of JSON for each update, as in `/v1/status`.
    """
    if not 0.1 <= interval <= 3600:
        raise InvalidRequest(f"interval is {interval:g}; must be between 0.1 and 3600 seconds", "interval")
    api = server.api()
    if as_json:
        _print_lines(api, interval, once)
    elif once or not sys.stdout.isatty():
        _print_frame(api)
    else:
        _watch(api, interval)
    return 0


def _print_lines(api: Api, interval: float, once: bool) -> None:
    while True:
        print(json.dumps(api.status()), flush=True)
        if once:
            return
        time.sleep(interval)


def _print_frame(api: Api) -> None:
    from rich.console import Console

    from bridle.cli.top_view import frame

    Console(highlight=False).print(frame(api.status(), None, api.base))


def _watch(api: Api, interval: float) -> None:
    """Show updates on the terminal's alternate screen until Ctrl-C. If the server cannot be reached, try again."""
    from rich.live import Live

    frames = _frames(api)
    first = next(frames)  # a wrong address or key is reported before the screen opens
    with Live(first, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.refresh()
                time.sleep(interval)
                live.update(next(frames))
        except KeyboardInterrupt:
            return


def _frames(api: Api) -> Iterator[RenderableType]:
    from bridle.cli.top_view import frame, trouble

    before: dict[str, Any] | None = None
    now = api.status()
    yield frame(now, before, api.base)
    while True:
        before = now
        try:
            now = api.status()
        except ApiError as error:
            yield trouble(before, str(error), api.base)
        else:
            yield frame(now, before, api.base)
