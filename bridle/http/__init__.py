"""The HTTP front-end: the OpenAI API, health, metrics and a page for browsers, over `bridle.serving`.

The package imports its public names on first use, so that a shard, which needs only a server's logs, starts faster.
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
