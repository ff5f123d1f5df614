"""OpenAI's batches on the server: files of requests, and their answers in the background."""

from bridle.http.openai.batches import files, routes

routers = (files.router, routes.router)
