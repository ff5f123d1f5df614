"""Conversations: the text of a model parsed into content, reasoning and tool calls. Knows no wire format."""
