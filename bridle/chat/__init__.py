"""Conversations: what a model writes told apart into content, thoughts and tool calls. Knows no wire format."""
