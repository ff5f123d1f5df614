"""Anthropic's Messages API: its bodies become conversations of ours, and turns become its blocks and events."""

from bridle.http.anthropic.routes import router

__all__ = ["router"]
