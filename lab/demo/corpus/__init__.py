"""The text the demo model is trained on: a closed world, exercises about it, and documents made of them.

Everything is drawn from a `random.Random` that the caller seeds; nothing is read from anywhere else.
"""

from lab.demo.corpus.document import Exercise, Piece, chat_pieces
from lab.demo.corpus.mix import document, draw, long_document
from lab.demo.corpus.split import Split, split_of

__all__ = ["Exercise", "Piece", "Split", "chat_pieces", "document", "draw", "long_document", "split_of"]
