"""Ollama's API: its bodies become bridle's conversations, and turns become its objects, one JSON text a line."""

from bridle.http.ollama import embed, manage, models, routes

routers = (routes.router, embed.router, models.router, manage.router)

__all__ = ["routers"]
