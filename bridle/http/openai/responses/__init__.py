"""OpenAI's Responses API, without stored responses: its items become bridle's conversations, and turns become its
items."""

from bridle.http.openai.responses.routes import router

__all__ = ["router"]
