"""The HTTP API of text-generation-inference, for text models: its routes, bodies, answers, streams and errors.

Oddities of the original on which its clients depend are kept (a list as the answer of `/`, the kinds of errors); its
defects are not. Stop strings match wherever they are, errors are always JSON, an unknown adapter is refused, a request
without parameters is decoded greedily like any other that does not ask for sampling. Fields beyond the original's are
bridle's own: controllers, constraints, `min_p`, exact counts under `details.usage`.
"""

from bridle.http.tgi import hosted, info, routes, tokens

routers = (routes.router, info.router, tokens.router, hosted.router)

__all__ = ["routers"]
