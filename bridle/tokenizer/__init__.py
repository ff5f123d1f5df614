"""Text and tokens: tokenizers, incremental detokenization, chat templates. Knows nothing of engines or
weights.

Heavy libraries are imported when a tokenizer is loaded, not before.
"""

from bridle.tokenizer.detokenizer import Detokenizer
from bridle.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
