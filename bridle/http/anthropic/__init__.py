"""Anthropic's Messages API: bodies are converted to bridle's conversations, and turns to its blocks and events."""

from bridle.http.anthropic.routes import router

__all__ = ["router"]
