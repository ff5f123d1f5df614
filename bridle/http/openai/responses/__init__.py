"""OpenAI's Responses API, without a memory: its items become conversations of ours, and turns become its items."""

from bridle.http.openai.responses.routes import router

__all__ = ["router"]
