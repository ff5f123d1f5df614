"""Text and tokens: tokenizers, incremental detokenization, and chat templates. Knows no engines and no weights.

Heavy libraries are imported when a tokenizer is loaded.
"""

from bridle.tokenizer.detokenizer import Detokenizer
from bridle.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
