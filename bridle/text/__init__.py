"""Text and tokens: tokenizers, incremental detokenization, chat templates. Knows nothing of engines or
weights.

Heavy libraries are imported when a tokenizer is loaded, not before.
"""

from bridle.text.detokenizer import Detokenizer
from bridle.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
