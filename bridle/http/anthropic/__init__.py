"""Anthropic's Messages API: its bodies become bridle's conversations, and turns become its blocks and events."""

from bridle.http.anthropic.routes import router

__all__ = ["router"]
