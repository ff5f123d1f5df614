"""Ollama's API: converts request bodies to bridle's chat requests, and outputs to Ollama's JSON objects, one per
line."""

from bridle.http.ollama import embed, manage, models, routes

routers = (routes.router, embed.router, models.router, manage.router)

__all__ = ["routers"]
