"""OpenAI's batches: users upload files of requests, and the server answers them in the background."""

from bridle.http.openai.batches import files, routes

routers = (files.router, routes.router)
