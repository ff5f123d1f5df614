"""The Python API: load a model in this process, generate in batches, stream, score, chat.

Nothing here talks to a network. Everything goes through the same engine and the same checks as the servers.
"""

from bridle.llm.chat_session import ChatSession
from bridle.llm.llm import LLM
from bridle.llm.scores import Score
from bridle.llm.streams import Reader, TextStream

__all__ = ["LLM", "ChatSession", "Reader", "Score", "TextStream"]
