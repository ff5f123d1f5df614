"""The HTTP API of text-generation-inference, for text models: its routes, bodies, answers, streams and errors.

Oddities of the original server that clients depend on are kept (a list as the answer of `/`, the kinds of errors);
defects of the original are not. Stop strings match wherever they are, errors are always JSON, and an unknown adapter is
refused. Decoding is greedy unless a parameter turns sampling on. Bridle's additional fields are controllers,
constraints, `min_p`, exact counts under `details.usage`.

The sibling server for pooling models is text-embeddings-inference; the package `bridle.http.tei` has its routes:
`/embed`, `/predict`, `/similarity`.
"""

from bridle.http.tei import routes as routes_module
from bridle.http.tgi import routes, tokens

routers = (routes.router, tokens.router, routes_module.router)

__all__ = ["routers"]
