"""Anthropic's Messages API: converts request bodies to bridle's conversations, and answers to blocks and events."""

from bridle.http.anthropic.routes import router

__all__ = ["router"]
