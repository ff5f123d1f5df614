"""The Python API: load a model in this process, then generate in batches, stream, score, or chat.

This package does not use the network. All requests go through the same engine and the same checks as in the servers.
"""

from bridle.llm.chat_session import ChatSession
from bridle.llm.llm import LLM
from bridle.llm.scores import TextScore
from bridle.llm.streams import Reader, TextStream

__all__ = ["LLM", "ChatSession", "Reader", "TextScore", "TextStream"]
