"""OpenAI's Responses API: converts request items to bridle's chat requests, and outputs to items."""

from bridle.http.openai.responses import conversations, routes, stored

routers = (routes.router, stored.router, conversations.router)
