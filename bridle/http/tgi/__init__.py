"""The HTTP API of text-generation-inference, for models that generate text: routes, request bodies, answers, streams
and errors.

Behaviour of the original server on which clients depend is kept, such as a list as the response of `/`. Defects of the
original server are not kept. Stop strings match at any position, errors are always JSON, and an unknown adapter is
refused. Decoding is greedy unless a parameter turns sampling on. Bridle adds fields for controllers and constraints,
`min_p`, and exact token counts in `details.usage`.

The related server for pooling models is text-embeddings-inference. The package `bridle.http.tei` has the routes of that
server, such as `/embed`.
"""

from bridle.http.tei import routes as routes_module
from bridle.http.tgi import routes, tokens

routers = (routes.router, tokens.router, routes_module.router)

__all__ = ["routers"]
