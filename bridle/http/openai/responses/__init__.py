"""OpenAI's Responses API: its items become bridle's conversations, and turns become its
items."""

from bridle.http.openai.responses import conversations, routes, stored

routers = (routes.router, stored.router, conversations.router)
