"""Conversations: renders prompts, and parses a model's output into content, reasoning and tool calls. Knows no wire
format."""
