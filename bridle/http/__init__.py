"""The HTTP server: the APIs, health checks, metrics and a page for browsers. The server uses `bridle.serving`.

Public names are imported on first use, so that a process that needs only a part of the package starts faster.
"""

from typing import TYPE_CHECKING

from bridle.lazy_names import lazy_names

if TYPE_CHECKING:
    from bridle.http.app import create_app as create_app
    from bridle.http.server.run import serve as serve
    from bridle.http.settings import HttpSettings as HttpSettings
    from bridle.http.settings import ServeSettings as ServeSettings
else:
    __getattr__, __all__ = lazy_names(
        __name__, {"settings": "HttpSettings ServeSettings", "app": "create_app", "server.run": "serve"}
    )
