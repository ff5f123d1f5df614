"""The HTTP API of text-generation-inference, for text models: its routes, bodies, answers, streams and errors.

Oddities of the original on which its clients depend are kept (a list as the answer of `/`, the kinds of errors); its
defects are not. Stop strings match wherever they are, errors are always JSON, and an unknown adapter is refused. A
request without parameters is decoded greedily, like any other that does not ask for sampling. Fields beyond the
original's are bridle's own: controllers, constraints, `min_p`, exact counts under `details.usage`.

This package also has the routes of its sibling for pooling models, text-embeddings-inference: `/embed`, `/predict`,
`/similarity`.
"""

from bridle.http.tei import routes as routes_module
from bridle.http.tgi import routes, tokens

routers = (routes.router, tokens.router, routes_module.router)

__all__ = ["routers"]
