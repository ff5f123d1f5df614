"""Anthropic's Messages API: converts request bodies to bridle's chat requests, and outputs to content blocks and
events."""

from bridle.http.anthropic.routes import router

__all__ = ["router"]
