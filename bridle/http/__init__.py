"""The HTTP front-end: the OpenAI API, health, metrics and a page for browsers, over `bridle.serving`.

Names are imported on first use, so that a shard, which needs only a server's logs, starts faster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle.http.app import create_app as create_app
    from bridle.http.server.run import serve as serve
    from bridle.http.settings import HttpSettings as HttpSettings
    from bridle.http.settings import ServeSettings as ServeSettings

_HOMES = {
    "HttpSettings": "bridle.http.settings",
    "ServeSettings": "bridle.http.settings",
    "create_app": "bridle.http.app",
    "serve": "bridle.http.server.run",
}

__all__ = ["HttpSettings", "ServeSettings", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
