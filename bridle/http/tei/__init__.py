"""The routes of text-embeddings-inference: `/embed`, `/predict`, `/similarity`, and what `/` is for a model that pools.

`/rerank` is one for all servers (`bridle.http.openai.scores`). Errors are those of text-generation-inference, whose
sibling it is.
"""

from bridle.http.tei import routes

routers = (routes.router,)

__all__ = ["routers"]
