"""The HTTP API of text-generation-inference, for text models: its routes, bodies, answers, streams and errors.

Oddities of the original on which its clients depend are kept (a list as the answer of `/`, the kinds of errors); its
defects are not. Stop strings match wherever they are, errors are always JSON, an unknown adapter is refused, a request
without parameters is decoded greedily like any other that does not ask for sampling. Fields beyond the original's are
bridle's own: controllers, constraints, `min_p`, exact counts under `details.usage`.

Beside it are the routes of its sibling for models that pool, text-embeddings-inference: `/embed`, `/predict`,
`/similarity`.
"""

from bridle.http.tei import routes as routes_module
from bridle.http.tgi import routes, tokens

routers = (routes.router, tokens.router, routes_module.router)

__all__ = ["routers"]
